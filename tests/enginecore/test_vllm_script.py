"""A vLLM user's script: names, order and meaning of `LLM` and `SamplingParams` (docs/from-vllm.md)."""

import inspect
import threading

import numpy as np
import pytest
import torch

import byte_tokenizer
import successor_model
from checkpoints import llama_config, save_random
from enginecore import LLM, SamplingParams
from enginecore.errors import RequestError
from enginecore.metrics import Counter, Gauge, Histogram

GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
TURNS = [{"role": "user", "content": "q"}]
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }};{% endfor %}"
    "{% if tools %}{{ tools | length }} tools;{% endif %}"
    "{% if add_generation_prompt %}>{% endif %}{{ mood }}"
)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    path = save_random(llama_config(), tmp_path_factory.mktemp("m-rand"))
    byte_tokenizer.save(path, chat_template=TEMPLATE)
    (path / "generation_config.json").write_text('{"temperature": 0.25, "top_k": 7}')
    return LLM(str(path), dtype="float32", device="cpu", max_model_len=64)


def answers(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def test_names_and_order():
    generate = [name for name in inspect.signature(LLM.generate).parameters if name != "self"]
    assert generate == ["prompts", "sampling_params", "use_tqdm", "priority"]
    chat = [name for name in inspect.signature(LLM.chat).parameters if name != "self"]
    assert chat == [
        "messages",
        "sampling_params",
        "use_tqdm",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tools",
        "chat_template_kwargs",
    ]


def test_sampling_params_by_name(llm):
    assert answers(llm.generate("abc", sampling_params=GREEDY)) == answers(llm.generate("abc", GREEDY))
    assert len(llm.chat(TURNS, sampling_params=GREEDY)[0].outputs[0].token_ids) == 3


@pytest.mark.parametrize(
    "call",
    [
        lambda llm: llm.generate("abc", params=GREEDY),
        lambda llm: llm.chat(TURNS, params=GREEDY),
        lambda llm: llm.chat(TURNS, sampling_parms=GREEDY),
        lambda llm: llm.chat(TURNS, priority=1),
    ],
)
def test_unknown_keywords_are_type_errors(llm, call):
    with pytest.raises(TypeError, match="unexpected keyword"):
        call(llm)


def test_chat_options(llm):
    def prompt(*args, **options):
        return llm.chat(TURNS, GREEDY, *args, **options)[0].prompt

    assert prompt() == "user:q;>"
    assert prompt(False, "{{ messages[0]['content'] }}!") == "q!"
    assert prompt(add_generation_prompt=False) == "user:q;"
    assert prompt(add_generation_prompt=False, continue_final_message=True) == "user:q"
    assert prompt(tools=[{"type": "function"}]) == "user:q;1 tools;>"
    assert prompt(chat_template_kwargs={"mood": "!", "add_generation_prompt": False}) == "user:q;!"


def test_priority_is_of_each_prompt(llm):
    with pytest.raises(RequestError, match="2 prompts but 1 priorities"):
        llm.generate(["a", "b"], GREEDY, priority=[1])
    with pytest.raises(RequestError, match="priority has no effect with scheduling_policy 'fcfs'"):
        llm.generate(["a", "b"], GREEDY, priority=[0, 1])
    assert len(llm.generate(["a", "b"], GREEDY, priority=np.array([0, 0]))) == 2


class Bar:
    """A bar that counts."""

    def __init__(self, total, desc):
        self.total, self.done, self.closed = total, 0, False

    def update(self, more):
        self.done += more

    def close(self):
        self.closed = True


def test_progress(llm, capfd):
    bars = []

    def make(**options):
        bars.append(Bar(**options))
        return bars[-1]

    llm.generate(["a", "b", "c"], GREEDY, use_tqdm=make)
    llm.chat([TURNS, TURNS], GREEDY, use_tqdm=make)
    assert [(bar.total, bar.done, bar.closed) for bar in bars] == [(3, 3, True), (2, 2, True)]
    llm.generate("a", GREEDY)
    assert capfd.readouterr().err == "", "a bar off a terminal"


def test_the_engine_s_own_values(llm):
    defaults = llm.get_default_sampling_params()
    assert (defaults.temperature, defaults.top_k, defaults.max_tokens) == (0.25, 7, 16)


def test_metrics_are_vllms_kinds(llm):
    def ask():
        return {(metric.name, metric.labels.get("finished_reason")): metric for metric in llm.get_metrics()}

    before = ask()
    llm.generate(["abc", "abd"], GREEDY)
    after = ask()
    name = "octavo_generation_tokens_total", None
    assert isinstance(after[name], Counter)
    assert after[name].value - before[name].value == 6
    running = after["octavo_num_requests_running", None]
    assert running == Gauge(running.name, {"model_name": llm.llm_engine.config.model, "engine": "0"}, 0.0)
    assert after["octavo_engine_up", None].value == 1
    ended = "octavo_request_success_total", "length"
    assert after[ended].value - before[ended].value == 2
    for short, more in (("time_to_first_token", 2), ("inter_token_latency", 4), ("e2e_request_latency", 2)):
        key = f"octavo_{short}_seconds", None
        assert isinstance(after[key], Histogram)
        assert after[key].count - before[key].count == after[key].buckets["+Inf"] - before[key].count == more


def test_metrics_of_requests_that_are_given_up(llm):
    engine = llm.llm_engine

    def values():
        return {(value.name, value.labels.get("finished_reason")): value for value in llm.get_metrics()}

    aborted = "octavo_request_success_total", "abort"
    before = values()[aborted].value
    engine.add_request("gone", "abc", GREEDY)
    assert values()["octavo_num_requests_waiting", None].value == 1
    engine.abort_request("gone")
    engine.abort_request("gone")
    assert values()["octavo_num_requests_waiting", None].value == 0
    assert values()[aborted].value - before == 1


def test_the_prefix_cache_can_be_forgotten_and_passed_over(llm):
    prompt = {"prompt_token_ids": list(range(40))}
    unread = GREEDY.clone()
    unread.skip_reading_prefix_cache = True

    def cached(params):
        return llm.generate(prompt, params)[0].num_cached_tokens

    cached(GREEDY)
    assert [cached(GREEDY), cached(unread)] == [32, 0]
    assert llm.reset_prefix_cache() is True
    assert cached(GREEDY) == 0


def test_the_tokenizer(llm):
    tokenizer = llm.get_tokenizer()
    assert tokenizer.encode("ab<eos>") == [97, 98, 257]
    assert tokenizer.decode([97, 98, 257]) == "ab<eos>"
    assert tokenizer.decode(np.array([97, 257]), skip_special_tokens=True) == "a"
    assert tokenizer.batch_decode([[97], [98]]) == ["a", "b"]
    assert tokenizer("ab") == {"input_ids": [97, 98], "attention_mask": [1, 1]}
    assert tokenizer(["a", "b"])["input_ids"] == [[97], [98]]
    assert tokenizer.convert_tokens_to_ids(["a", "<eos>", "no such"]) == [97, 257, None]
    assert tokenizer.convert_ids_to_tokens([97, 257]) == ["a", "<eos>"]
    assert (tokenizer.eos_token, tokenizer.eos_token_id, tokenizer.pad_token_id) == ("<eos>", 257, 259)
    assert tokenizer.apply_chat_template(TURNS, tokenize=False) == "user:q;"
    ids = list(b"user:q;>")
    assert tokenizer.apply_chat_template(TURNS, add_generation_prompt=True) == ids
    with pytest.raises(TypeError, match="return_tensors is not supported"):
        tokenizer.apply_chat_template(TURNS, return_tensors="pt")


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (torch.tensor([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        ([np.array([5]), np.array([6])], [[5], [6]]),
        ([torch.tensor([5]), torch.tensor([6])], [[5], [6]]),
        ([torch.tensor(5), torch.tensor(6)], [[5, 6]]),
        ([np.int32(5), 6], [[5, 6]]),
        (np.array([5, 6], np.uint8), [[5, 6]]),
        (np.array(["A", "B"]), [[65], [66]]),
        ([{"prompt_token_ids": np.array([5])}, {"prompt_token_ids": torch.tensor([6])}], [[5], [6]]),
    ],
    ids=str,
)
def test_arrays_are_taken_as_lists_are(llm, prompts, expected):
    assert [output.prompt_token_ids for output in llm.generate(prompts, GREEDY)] == expected


@pytest.mark.parametrize(
    "prompts",
    [
        np.array([1.0, 2.0]),
        torch.tensor([1.5]),
        np.array([True, False]),
        [np.array([[1, 2]])],
        np.array([[[1, 2]]]),
        np.array(5),
        torch.tensor(True),
        {"prompt_token_ids": np.array([[1, 2]])},
        [[1, 2.0]],
    ],
    ids=str,
)
def test_other_arrays_are_refused_in_one_line(llm, prompts):
    with pytest.raises(RequestError) as error:
        llm.generate(prompts, GREEDY)
    assert "prompt" in str(error.value)
    assert "\n" not in str(error.value)


def test_calls_of_threads_count_their_own_progress(llm):
    bars = {}

    def job(count):
        def make(**options):
            bars[count] = Bar(**options)
            return bars[count]

        llm.generate(["abc"] * count, GREEDY, use_tqdm=make)

    threads = [threading.Thread(target=job, args=(count,), daemon=True) for count in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert {count: bar.done for count, bar in bars.items()} == {1: 1, 2: 2, 3: 3}


def test_a_model_without_tokenizer_says_so(tmp_path):
    path = successor_model.write(tmp_path / "m")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).unlink()
    with pytest.raises(RequestError, match="no tokenizer"):
        LLM(str(path), device="cpu").get_tokenizer()
