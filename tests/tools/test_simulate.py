"""The trace simulator: what a trace says, what a step costs, what a replay adds up to."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from batchsched import Fcfs, Limits, Priority, Recompute, StepPlan, Swap, TimeSlice
from data_files import AZURE_CODE, AZURE_CONVERSATION, MOONCAKE_CONVERSATION
from simulate import report, traces
from simulate.__main__ import main
from simulate.cluster import Cluster
from simulate.device import DEVICES, Chip, Device, Model
from simulate.outcome import Outcome
from simulate.rank import Setup
from simulate.traces import Trace

# A second of overhead a step, and nothing else unless a test says so.
CLOCKWORK = Device(overhead=1.0, prefill=0, decode=0, context=0, attention=0, swap=0, kv_tokens=1 << 20)


def trace(*requests, hash_ids=None):
    """Requests as (arrival, prompt, output)."""
    arrivals, prompts, outputs = zip(*requests)
    ids = None if hash_ids is None else [np.array(each) for each in hash_ids]
    return Trace("made up", np.array(arrivals, float), np.array(prompts), np.array(outputs), ids)


def setup(device=CLOCKWORK, *, policy=Fcfs, preemption=Recompute, blocks=1000, block_size=16, **options):
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 4096}
    host_blocks = options.pop("host_blocks", 0)
    stretches = options.pop("stretches", True)
    return Setup(
        device=device,
        limits=Limits(**(limits | options)),
        num_blocks=blocks,
        block_size=block_size,
        policy=policy,
        preemption=preemption,
        host_blocks=host_blocks,
        stretches=stretches,
    )


def plan(starts, counts):
    none = np.empty(0, np.int32)
    starts, counts = np.array(starts, np.int32), np.array(counts, np.int32)
    return StepPlan(1, np.arange(starts.size), starts, counts, counts > 0, [], none, 0 * counts, none)


class TestTraces:
    def test_azure_rows_become_seconds_and_tokens(self, tmp_path):
        path = tmp_path / "some.csv"
        path.write_text(
            "TIMESTAMP,ContextTokens,GeneratedTokens\n"
            "2023-11-16 18:15:46.6805900,374,44\n"
            "2023-11-16 18:15:50.9951690,396,109\n"
        )
        loaded = traces.load(path)
        assert loaded.arrivals.tolist() == [0, 4.314579]
        assert (loaded.prompts.tolist(), loaded.outputs.tolist()) == ([374, 396], [44, 109])
        assert loaded.hash_ids is None

    def test_recorded_traces_are_read(self):
        conversation, code = traces.load(AZURE_CONVERSATION), traces.load(AZURE_CODE)
        assert (len(conversation), conversation.longest) == (200, 4176)
        assert (len(code), code.prompts[0], code.outputs[0]) == (100, 4808, 10)
        assert conversation.arrivals[-1] == pytest.approx(61.263546)
        mooncake = traces.load(MOONCAKE_CONVERSATION)
        assert (len(mooncake), mooncake.tokens(0).size, mooncake.arrivals[-1]) == (200, 6758, 72)

    def test_mooncake_lines_become_seconds_tokens_and_hash_ids(self, tmp_path):
        path = tmp_path / "some.jsonl"
        lines = [
            {"timestamp": 500, "input_length": 600, "output_length": 3, "hash_ids": [0, 7]},
            {"timestamp": 2500, "input_length": 512, "output_length": 1, "hash_ids": [0]},
        ]
        path.write_text("\n".join(map(json.dumps, lines)))
        loaded = traces.load(path)
        assert loaded.arrivals.tolist() == [0, 2]
        assert (loaded.prompts.tolist(), loaded.outputs.tolist()) == ([600, 512], [3, 1])
        assert [ids.tolist() for ids in loaded.hash_ids or []] == [[0, 7], [0]]

    def test_equal_hash_ids_are_equal_tokens(self):
        made = trace((0, 600, 1), (1, 1024, 1), hash_ids=[[5, 9], [5, 8]])
        first, second = made.tokens(0), made.tokens(1)
        assert (first.size, second.size, first.dtype) == (600, 1024, np.int32)
        assert (first[:512] == second[:512]).all()
        assert not np.isin(first[512:], second).any()

    def test_without_hash_ids_no_two_prompts_share_a_token_block(self):
        made = trace(*((i, 40, 1) for i in range(20)))
        assert len({tuple(made.tokens(i)[:16].tolist()) for i in range(20)}) == 20

    def test_whole_blocks_and_one_token(self):
        made = trace((0, 600, 1), (1, 512, 1), hash_ids=[[5, 9], [5]]).in_whole_blocks()
        assert made.prompts.tolist() == [1025, 513]
        assert made.tokens(0).size == 1025

    def test_duration_is_of_the_trace_and_rate_compresses_it(self):
        made = trace((0, 1, 1), (10, 2, 1), (20, 3, 1)).first(10).faster(2)
        assert (made.arrivals.tolist(), made.prompts.tolist()) == ([0, 5], [1, 2])

    @pytest.mark.parametrize(
        ("name", "text", "message"),
        [
            ("a.txt", "", "neither"),
            ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n", "no requests"),
            (
                "a.jsonl",
                '{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}',
                "2 blocks",
            ),
        ],
    )
    def test_what_is_no_trace_is_refused(self, tmp_path, name, text, message):
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match=message):
            traces.load(tmp_path / name)


class TestDevice:
    device = Device(overhead=1000, prefill=100, decode=10, context=0.1, attention=0.001, swap=0, kv_tokens=0)

    def test_decoding_rows_cost_themselves_and_their_context(self):
        assert self.device.seconds(plan([4, 9], [1, 1])) == pytest.approx(1000 + 2 * 10 + 15 * 0.1)

    def test_a_chunk_costs_its_tokens_and_the_pairs_it_attends_to(self):
        # Positions 4, 5 and 6 see 5, 6 and 7 keys.
        expected = 1000 + 3 * 100 + 1 * 10 + (7 + 10) * 0.1 + 18 * 0.001
        assert self.device.seconds(plan([4, 9], [3, 1])) == pytest.approx(expected)

    def test_a_stretch_is_its_steps_one_after_another(self):
        singly = sum(self.device.seconds(plan([4 + i, 9 + i], [1, 1])) for i in range(5))
        assert self.device.stretch(rows=2, context=15, steps=5) == pytest.approx(singly)

    def test_steps_within_is_the_most_that_end_in_time(self):
        four, five = (self.device.stretch(2, 15, steps) for steps in (4, 5))
        assert self.device.steps_within((four + five) / 2, 2, 15, 100) == 4
        assert self.device.steps_within(math.inf, 2, 15, 100) == 100

    def test_seconds_follow_from_the_data_sheet(self):
        chip = Chip(flops=1e15, memory=100e9, bandwidth=1e12, host_bandwidth=1e10)
        made = Device.of(chip, Model(parameters=1e10, layers=10, hidden=1000, kv_heads=1, head_dim=100))
        # 20 GB of weights at 80 % of 1 TB/s, and a millisecond; 2e10 operations at 55 % of a PFLOP/s.
        assert made.overhead == pytest.approx(0.001 + 0.025)
        assert made.prefill == pytest.approx(2e10 / 5.5e14)
        # 4,000 bytes of keys and values a token; 90 GB less activations and weights hold them.
        assert made.context == pytest.approx(4000 / 8e11)
        assert made.kv_tokens == 17_000_000
        assert made.swap == pytest.approx(4000 / 8e9)


class TestReplay:
    def test_times_are_those_of_the_steps(self):
        # Steps of a second: 100 prompt tokens take two of them under a budget of 64.
        outcome = Cluster(trace((0, 100, 3), (10.5, 10, 1)), setup()).replay()
        assert outcome.first_token.tolist() == [2, 11.5]
        assert outcome.finished.tolist() == [4, 11.5]
        assert outcome.ttft.tolist() == [2, 1]
        assert outcome.tpot[0] == 1
        assert np.isnan(outcome.tpot[1])

    def test_an_arrival_waits_for_the_step_that_runs(self):
        outcome = Cluster(trace((0, 10, 20), (3.25, 10, 2)), setup()).replay()
        assert outcome.first_token.tolist() == [1, 5]
        assert outcome.finished.tolist() == [20, 6]

    def test_what_can_never_fit_is_refused_and_the_rest_runs(self):
        outcome = Cluster(trace((0, 100, 5), (0, 10, 5)), setup(blocks=4)).replay()
        assert (outcome.refused, outcome.completed.tolist()) == (1, [False, True])

    @pytest.mark.parametrize("ranks", [1, 3])
    def test_stretches_change_nothing(self, ranks):
        numbers = np.random.default_rng(7)
        arrivals = np.cumsum(numbers.exponential(0.05, 150)).tolist()
        made = trace(*zip(arrivals, numbers.integers(1, 400, 150), numbers.integers(1, 200, 150)))
        device = DEVICES["h100-8b"]
        limits = {"max_num_seqs": 24, "max_num_batched_tokens": 512}
        single, stretched = (
            Cluster(made, setup(device, blocks=800, stretches=each, **limits), ranks=ranks).replay()
            for each in (False, True)
        )
        assert stretched.steps == single.steps
        assert stretched.busy_seconds == pytest.approx(single.busy_seconds)
        np.testing.assert_allclose(stretched.first_token, single.first_token, rtol=1e-12)
        np.testing.assert_allclose(stretched.finished, single.finished, rtol=1e-12)

    def test_the_router_takes_the_rank_that_is_least_loaded(self):
        # One sequence a rank: whoever shares one waits.
        made = trace((0, 10, 9), (0, 10, 3), (0, 10, 9), (1.5, 10, 2))
        outcome = Cluster(made, setup(max_num_seqs=1), ranks=2).replay()
        # The third is the first rank's in turn. The last joins the second request, which ends at 3.
        assert outcome.first_token.tolist() == [1, 1, 10, 4]

    @pytest.mark.parametrize(("report_interval", "first"), [(0, 4.5), (1000, 10)])
    def test_the_router_knows_what_it_has_sent_since_a_report_and_no_more(self, report_interval, first):
        made = trace((0, 10, 9), (0, 10, 3), (3.5, 10, 2))
        outcome = Cluster(made, setup(max_num_seqs=1), ranks=2, report_interval=report_interval).replay()
        # The second has ended, which only a report tells: without one it is a tie, and the first rank's turn.
        assert outcome.first_token.tolist() == [1, 1, first]

    @pytest.mark.parametrize(("affinity", "cached"), [(False, 0), (True, 1024)])
    def test_affinity_finds_the_rank_that_has_the_prefix(self, affinity, cached):
        # Both ranks are busy, the one without the prefix a little less.
        made = trace(
            *((0, 1030, 99), (0, 900, 99), (0, 900, 99), (40, 1030, 1)),
            hash_ids=[[1, 2, 3], [5, 6], [7, 8], [1, 2, 4]],
        )
        outcome = Cluster(made, setup(block_size=512), ranks=2, affinity=affinity).replay()
        assert outcome.cached.tolist() == [0, 0, 0, cached]

    def test_swapping_is_counted_and_takes_time(self):
        made = trace((0, 48, 40), (0, 48, 40))
        free, slow = (
            Cluster(
                made,
                setup(replace(CLOCKWORK, swap=swap), preemption=Swap, blocks=8, host_blocks=8, watermark=0),
            ).replay()
            for swap in (0.0, 0.5)
        )
        assert free.preemptions > 0
        assert free.copied_out >= free.copied_in > 0
        moved = 16 * 0.5 * (slow.copied_out + slow.copied_in)
        assert slow.busy_seconds == pytest.approx(slow.steps + moved)

    def test_priorities_are_dealt_out_in_turn_and_kept_apart(self):
        made = trace(*((0.001 * i, 10, 20) for i in range(40)))
        ranks = setup(policy=lambda: Priority(ageing=1e6), max_num_seqs=4)
        figures = report.summary(Cluster(made, ranks, classes=2).replay(), 16)
        assert figures["classes"]["0"]["ttft"]["p99"] < figures["classes"]["1"]["ttft"]["p50"]

    def test_time_slices_let_the_second_begin_before_the_first_ends(self):
        made = trace((0, 10, 100), (0.5, 10, 10))
        first, sliced = (
            Cluster(made, setup(policy=policy, max_num_seqs=1)).replay()
            for policy in (Fcfs, lambda: TimeSlice(10))
        )
        assert first.first_token.tolist() == [1, 101]
        assert sliced.first_token[1] < 20


class TestReport:
    def test_spread_leaves_out_what_is_not_known(self):
        assert report.spread(np.array([1, 2, 3, np.nan])) == {
            "mean": 2,
            "p50": 2,
            "p90": pytest.approx(2.8),
            "p99": pytest.approx(2.98),
        }

    def test_block_hits_are_of_the_blocks_that_could_have_been_found(self):
        # One of 600 tokens, and one of 1,024, since the last token is always computed.
        outcome = Outcome(trace((0, 600, 1), (0, 1024, 1)))
        outcome.begin(np.array([0, 1]), 1.0, np.array([0, 512], np.int32))
        outcome.end(np.array([0, 1]), 2.0, np.array([1, 1], np.int32))
        figures = report.summary(outcome, 512)
        assert figures["block_hit_rate"] == 1 / 2
        assert figures["hit_rate"] == 512 / 1624

    def test_an_unlimited_cache_hits_as_often_as_a_set_of_hash_ids(self, tmp_path):
        path = tmp_path / "figures.json"
        options = "--duration 60 --device instant --blocks unlimited --max-output 1 --whole-blocks"
        source = ["--trace", str(MOONCAKE_CONVERSATION)]
        assert main([*source, *options.split(), "--json", str(path)]) == 0
        seen, hits, blocks = set(), 0, 0
        for line in MOONCAKE_CONVERSATION.read_text().splitlines():
            request = json.loads(line)
            if request["timestamp"] <= 60_000:
                hits += sum(block in seen for block in request["hash_ids"])
                blocks += len(request["hash_ids"])
                seen.update(request["hash_ids"])
        figures = json.loads(path.read_text())["runs"]["fcfs"]
        assert hits > 200
        assert figures["block_hit_rate"] == hits / blocks


class TestCommand:
    def test_it_prints_a_table_and_draws(self, tmp_path, capsys):
        path = tmp_path / "some.csv"
        rows = [f"2023-11-16 18:15:{i:02}.0000000,{100 + i},{i + 1}" for i in range(20)]
        path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
        picture = tmp_path / "runs.png"
        command = ["--trace", str(path), "--policy", "fcfs", "shortest-first", "--png", str(picture)]
        assert main(command) == 0
        printed = capsys.readouterr().out
        assert "| TTFT p99, s" in printed
        assert "shortest-first" in printed
        assert picture.read_bytes().startswith(b"\x89PNG")

    def test_the_first_command_of_its_documentation_runs_in_a_checkout(self, tmp_path, capsys, monkeypatch):
        monkeypatch.chdir(tmp_path)
        text = (Path(__file__).parents[2] / "tools/simulate.md").read_text()
        command = next(line for line in text.splitlines() if "tools/simulate.py" in line).split()
        assert main(command[command.index("tools/simulate.py") + 1 :]) == 0
        assert "azure_conversation" in capsys.readouterr().out
        assert (tmp_path / "runs.png").stat().st_size and (tmp_path / "runs.json").stat().st_size

    def test_a_whole_trace_is_read_from_the_folder_that_is_named(self, tmp_path, capsys):
        whole = tmp_path / "AzureLLMInferenceTrace_code.csv"
        whole.write_text("".join(AZURE_CODE.read_text().splitlines(keepends=True)[:5]))
        assert main(["azure-code", "--folder", str(tmp_path)]) == 0
        assert "4 requests" in capsys.readouterr().out
        assert main(["mooncake-synthetic", "--folder", str(tmp_path)]) == 1
        assert main(["mooncake-synthetic"]) == 1
        assert capsys.readouterr().err.count("tools/simulate.md says where") == 2

    def test_a_trace_that_is_not_there_is_said_so(self, capsys):
        assert main(["--trace", "nowhere.csv"]) == 1
        assert "nowhere.csv" in capsys.readouterr().err

    def test_a_policy_of_ones_own_is_replayed_or_named(self, tmp_path, capsys, monkeypatch):
        (tmp_path / "simulated_policies.py").write_text(
            "from batchsched import Fcfs\n\nclass Own(Fcfs):\n    pass\n"
        )
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("sys.path", [*__import__("sys").path])
        command = ["--trace", str(AZURE_CODE), "--duration", "60", "--policy", "fcfs"]
        out = tmp_path / "runs.json"
        assert main([*command, "simulated_policies:Own", "--json", str(out)]) == 0
        runs = json.loads(out.read_text())["runs"]
        assert runs["simulated_policies:Own"] == runs["fcfs"]
        with pytest.raises(SystemExit) as ended:
            main([*command, "simulated_policies:Missing"])
        assert ended.value.code == 2
        assert "simulated_policies:Missing: module simulated_policies" in capsys.readouterr().err
