"""Admission: requests that never fit, blocks promised and kept free, and hits in the prefix cache."""

import pytest

from batchsched import Finish, NeverFits, Priority, PromptTooLong, RequestRefused


def test_a_request_is_admitted_when_its_whole_prompt_fits_though_a_chunk_would(engine):
    e = engine(num_blocks=4, max_num_batched_tokens=4)
    e.add(1, prompt=4, max_tokens=5)  # 2 blocks in the end
    e.add(2, prompt=12, max_tokens=1)  # 3 blocks
    e.step()
    assert e.step() == {1: (4, 1, "*")}  # 2 of 4 blocks are free, 3 are needed
    e.drain()
    e.check_answers()


def test_blocks_for_the_rest_of_a_running_prompt_are_not_promised_twice(engine):
    e = engine(num_blocks=5, max_num_batched_tokens=8, long_prefill_token_threshold=4)
    e.add(1, prompt=12, max_tokens=1)  # 3 blocks, one a step
    e.add(2, prompt=12, max_tokens=1)
    e.add(3, prompt=4, max_tokens=1)
    assert e.step() == {1: (0, 4)}  # 4 blocks are free, 2 of them are promised
    assert e.step() == {1: (4, 4)}
    assert e.step() == {1: (8, 4, "*")}
    assert e.step() == {2: (0, 4), 3: (0, 4, "*")}
    assert e.scheduler.load().preemptions == 0


def test_no_request_overtakes_the_first_in_the_queue(engine):
    e = engine(num_blocks=4)
    e.add(1, prompt=8, max_tokens=3)
    e.add(2, prompt=12, max_tokens=1)
    e.add(3, prompt=1, max_tokens=1)  # would fit at once
    assert list(e.step()) == [1]
    assert list(e.step()) == [1]
    assert list(e.step()) == [1]
    assert list(e.step()) == [2, 3]


def test_a_request_that_can_never_fit_is_refused_with_the_numbers(engine):
    e = engine(num_blocks=8, block_size=16, max_model_len=512)
    with pytest.raises(NeverFits, match=r"need 13 KV blocks and there are 8"):
        e.add(1, prompt=200, max_tokens=1)
    for handle in (2, 3, 4):
        e.add(handle, prompt=5, max_tokens=3)
    e.drain()
    e.check_answers()


def test_the_last_token_needs_no_block(engine):
    e = engine(num_blocks=2)
    e.add(1, prompt=5, max_tokens=4)  # 9 tokens, 8 of them run: just the 2 blocks
    with pytest.raises(NeverFits):
        e.add(2, prompt=5, max_tokens=5)
    e.drain()
    e.check_answers()


def test_tokens_beyond_max_model_len_need_no_block(engine):
    e = engine(num_blocks=2, max_model_len=9)
    e.add(1, prompt=5, max_tokens=1000)
    e.drain()
    assert len(e.generated[1]) == 4
    assert e.finished == {1: Finish.LENGTH}


@pytest.mark.parametrize(("prompt", "max_tokens", "generated"), [(62, 100, 2), (63, 1, 1), (63, 2, 1)])
def test_a_prompt_just_below_max_model_len(engine, prompt, max_tokens, generated):
    e = engine(num_blocks=32, max_model_len=64)
    e.add(1, prompt=prompt, max_tokens=max_tokens)
    e.drain()
    assert len(e.generated[1]) == generated
    assert e.finished == {1: Finish.LENGTH}


@pytest.mark.parametrize("prompt", [64, 65])
def test_a_prompt_that_leaves_no_room_for_a_token_is_refused(engine, prompt):
    e = engine(num_blocks=32, max_model_len=64)
    with pytest.raises(PromptTooLong, match=rf"{prompt} tokens .* context 64"):
        e.add(1, prompt=prompt, max_tokens=1)


def test_generated_tokens_that_leave_no_room_are_refused(engine):
    e = engine(num_blocks=32, max_model_len=64)
    with pytest.raises(RequestRefused, match=r"60 tokens of the prompt and 4 generated .* context of 64"):
        e.add(1, prompt=60, max_tokens=10, generated=[1, 2, 3, 4])
    e.add(2, prompt=60, max_tokens=10, generated=[1, 2, 3])
    assert e.scheduler.load().waiting == 1


class TwoGroups:
    """Answers for two layer groups, of which one has a window of 8 tokens; nothing else is asked of it."""

    block_size, num_blocks, num_free = 4, 10, 10

    def blocks_for(self, length):
        return -(-length // 4) + min(-(-length // 4), 3)

    def prefix(self, tokens, extra, *, reuse):
        return None


def test_memory_says_how_many_blocks_a_request_takes(engine_on):
    e = engine_on(TwoGroups())
    e.add(1, prompt=20, max_tokens=9)  # 28 tokens run: 7 blocks and 3
    with pytest.raises(NeverFits, match="need 11 KV blocks and there are 10"):
        e.add(2, prompt=20, max_tokens=10)
    e.add(3, prompt=20, max_tokens=9, generated=[5])  # counted from the prompt's end as well
    with pytest.raises(NeverFits, match="need 11 KV blocks and there are 10"):
        e.add(4, prompt=20, max_tokens=10, generated=[5])
    assert e.scheduler.load().waiting == 2


def test_admission_leaves_the_watermark_for_running_rows(engine):
    e = engine(num_blocks=6, watermark=0.5)
    for handle in (1, 2, 3):
        e.add(handle, prompt=7, max_tokens=2)
    assert list(e.step()) == [1, 2]  # 3 would take the last 2 blocks, and 1 is to be left for two rows
    assert list(e.step()) == [1, 2]
    assert list(e.step()) == [3]


def test_the_watermark_is_rounded_down(engine):
    e = engine(num_blocks=7, watermark=0.5)
    for handle in (1, 2, 3):
        e.add(handle, prompt=7, max_tokens=2)
    assert list(e.step()) == [1, 2, 3]
    e.add(4, prompt=4, max_tokens=1)
    assert list(e.step()) == [1, 2, 3]  # 4 would take the last block; half a block for each of three is 1


def test_a_request_that_would_run_alone_needs_no_watermark(engine):
    e = engine(num_blocks=3, watermark=100)
    e.add(1, prompt=9, max_tokens=4)
    e.add(2, prompt=9, max_tokens=4)
    e.drain()
    e.check_answers()


def test_memory_held_by_someone_else_for_good_is_an_error(engine):
    e = engine(num_blocks=8)
    e.memory.held["someone else"] = 7
    e.add(1, prompt=8, max_tokens=1)
    with pytest.raises(RuntimeError, match=r"1 requests wait for KV blocks .* 1 of 8 are free"):
        e.plan()
    del e.memory.held["someone else"]
    e.drain()
    assert e.finished == {1: Finish.LENGTH}


class TestPrefixCache:
    def test_cached_tokens_are_not_run(self, engine):
        e = engine(num_blocks=16, prefix_cache=True)
        prompt = list(range(1, 11))
        e.add(1, prompt, max_tokens=2)
        e.step()
        e.add(2, prompt, max_tokens=2)
        plan = e.plan()
        assert [(o.handle, o.num_cached, o.num_prompt) for o in plan.admitted] == [(2, 8, 10)]
        assert e.ran(plan) == {1: (10, 1, "*"), 2: (8, 2, "*")}
        assert e.commit().num_cached.tolist() == [0, 8]

    def test_one_token_is_left_to_run_when_all_are_cached(self, engine):
        e = engine(num_blocks=16, prefix_cache=True)
        e.add(1, list(range(8)), max_tokens=1)
        e.step()
        e.add(2, list(range(8)), max_tokens=1)
        assert e.step() == {2: (4, 4, "*")}

    def test_hits_admit_a_request_that_would_not_fit_without(self, engine):
        e = engine(num_blocks=5, prefix_cache=True)
        e.add(1, list(range(12)), max_tokens=5)
        e.step()
        e.add(2, list(range(13)), max_tokens=1)  # 4 blocks, 3 of them those of 1
        assert e.step() == {1: (12, 1, "*"), 2: (12, 1, "*")}

    def test_without_use_cache_every_position_is_computed(self, engine):
        e = engine(num_blocks=16, prefix_cache=True)
        prompt = list(range(1, 11))
        e.add(1, prompt, max_tokens=1)
        e.step()
        e.add(2, prompt, max_tokens=1, use_cache=False)
        assert e.step() == {2: (0, 10, "*")}

    def test_requests_with_different_extra_share_nothing(self, engine):
        e = engine(num_blocks=16, prefix_cache=True)
        prompt = list(range(1, 11))
        e.add(1, prompt, max_tokens=1, extra=(("salt", b"a"),))
        e.step()
        e.add(2, prompt, max_tokens=1, extra=(("salt", b"b"),))
        e.add(3, prompt, max_tokens=1, extra=(("salt", b"a"),))
        assert e.step() == {2: (0, 10, "*"), 3: (8, 2, "*")}

    def test_a_later_request_begins_behind_the_blocks_that_its_first_step_fills(self, engine):
        e = engine(num_blocks=32, prefix_cache=True, max_num_batched_tokens=26)
        prompt = list(range(1, 31))
        e.add(1, prompt, max_tokens=1)
        e.add(2, prompt, max_tokens=1)
        assert e.step() == {1: (0, 26)}
        assert e.step() == {1: (26, 4, "*"), 2: (28, 2, "*")}  # the seventh block is full after this step

    def test_the_blocks_of_the_last_step_are_cached_too(self, engine):
        e = engine(num_blocks=32, prefix_cache=True)
        e.add(0, list(range(6)), max_tokens=3)  # 8 of 9 tokens are run
        e.drain()
        e.add(1, [*range(6), *e.generated[0]], max_tokens=1)
        assert e.step() == {1: (8, 1, "*")}


SHARING = [{"prefix_cache": True}, {"paged": True}]


@pytest.mark.parametrize("memory", SHARING, ids=["plain", "kvblocks"])
class TestOnePrefixInOneStep:
    """The runner reads every block it is given: it must hold the row's own tokens by then."""

    PROMPT = tuple(range(1, 11))

    def test_it_is_computed_once(self, engine, memory):
        e = engine(num_blocks=32, **memory)
        for handle in range(4):
            e.add(handle, self.PROMPT, max_tokens=3)
        assert e.ran(e.plan()) == {
            0: (0, 10, "*"),
            1: (8, 2, "*"),
            2: (8, 2, "*"),
            3: (8, 2, "*"),
        }
        assert e.memory.num_free == 32 - 2 - 4
        assert e.commit().num_cached.tolist() == [0, 8, 8, 8]
        e.drain()
        e.check_answers()

    def test_all_rows_but_the_first_start_behind_its_chunk(self, engine, memory):
        e = engine(num_blocks=32, long_prefill_token_threshold=6, **memory)
        for handle in range(3):
            e.add(handle, self.PROMPT, max_tokens=3)
        assert e.step() == {0: (0, 6), 1: (4, 6, "*"), 2: (8, 2, "*")}
        e.drain()
        e.check_answers()

    def test_a_step_in_flight_counts(self, engine, memory):
        e = engine(num_blocks=32, **memory)
        e.add(0, self.PROMPT, max_tokens=3)
        e.plan()
        e.add(1, self.PROMPT, max_tokens=3)
        assert e.ran(e.plan()) == {0: (10, 1, "*"), 1: (8, 2, "*")}
        e.drain(depth=1)
        e.check_answers()

    @pytest.mark.parametrize("stages", [2, 3])
    def test_in_microbatches_of_a_pipeline(self, engine, memory, stages):
        e = engine(num_blocks=32, stages=stages, max_num_batched_tokens=12, **memory)
        for handle in range(4):
            e.add(handle, self.PROMPT, max_tokens=3)
        assert e.ran(e.plan()) == {0: (0, 10, "*"), 1: (8, 2, "*")}
        assert e.ran(e.plan()) == {2: (8, 2, "*"), 3: (8, 2, "*")}
        e.drain(depth=stages - 1)
        e.check_answers()

    @pytest.mark.parametrize("end", ["abort", "hold"])
    def test_the_first_ends_before_the_step_has_run(self, engine, memory, end):
        e = engine(num_blocks=32, max_num_seqs=2, **memory)
        for handle in range(3):
            e.add(handle, self.PROMPT, max_tokens=3)
        e.plan()
        assert getattr(e.scheduler, end)(0)
        assert e.ran(e.plan()) == {1: (10, 1, "*")}
        assert e.memory.num_free == 32 - 4  # nothing is freed before the first step is committed
        e.commit()
        assert e.ran(e.plan()) == {1: (11, 1, "*"), 2: (8, 2, "*")}
        e.scheduler.release(0)
        if end == "abort":
            del e.requests[0]
        e.drain(depth=1)
        e.check_answers()

    def test_the_first_is_preempted_before_the_step_has_run(self, engine, memory):
        e = engine(num_blocks=4, policy=Priority(1e6), clock=lambda: 0.0, max_num_seqs=2, **memory)
        for handle in range(2):
            e.add(handle, self.PROMPT, max_tokens=3, priority=2)
        e.plan()
        e.add(2, [50] * 13, max_tokens=1)
        e.drain(depth=1)
        assert e.scheduler.load().preemptions > 0
        e.check_answers()

    def test_who_may_not_read_the_cache_fills_blocks_for_others(self, engine, memory):
        e = engine(num_blocks=32, **memory)
        e.add(0, self.PROMPT, max_tokens=1, use_cache=False)
        e.add(1, self.PROMPT, max_tokens=1)
        e.add(2, self.PROMPT, max_tokens=1, use_cache=False)
        e.add(3, self.PROMPT, max_tokens=1, extra=(("salt", b"a"),))
        assert e.step() == {0: (0, 10, "*"), 1: (8, 2, "*"), 2: (0, 10, "*"), 3: (0, 10, "*")}
        e.check_answers()

    def test_a_request_fits_because_it_shares(self, engine, memory):
        e = engine(num_blocks=4, **memory)
        for handle in range(3):
            e.add(handle, self.PROMPT, max_tokens=2)
        assert e.step() == {0: (0, 10, "*"), 1: (8, 2, "*")}
        e.drain()
        e.check_answers()
