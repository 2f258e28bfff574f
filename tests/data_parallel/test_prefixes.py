"""The front-end's view of cached prefixes, beside the block pools that it follows."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from enginecore.codec import Decoder, Encoder
from enginecore.data_parallel.prefixes import PrefixView, all_keys, kv_events, prompt_keys
from enginecore.messages import CoreMessage
from kvblocks import AllCleared, BlockRemoved, BlockStored, PagedMemory

BLOCK = 4


def memory(num_blocks: int = 16) -> PagedMemory:
    return PagedMemory(
        num_blocks=num_blocks, block_size=BLOCK, max_rows=2, max_blocks_per_row=16, record_events=True
    )


def run(made: PagedMemory, prompt: np.ndarray, cache_salt: str | None = None) -> None:
    """Compute a prompt and free its row."""
    salt = () if cache_salt is None else (("salt", cache_salt.encode()),)
    made.allocate(0, made.prefix(prompt, salt))
    made.grow([0], [prompt.size])
    tokens = np.zeros((2, 64), np.int32)
    tokens[0, : prompt.size] = prompt
    made.commit([0], [prompt.size], tokens)
    made.free(0)


def key(number: int) -> bytes:
    return number.to_bytes(8, "little") + bytes(24)


def test_events_come_to_what_is_held_after_them():
    found = kv_events(
        [BlockStored(0, key(1)), BlockRemoved(0, key(1)), BlockRemoved(1, key(2)), BlockStored(2, key(2))]
    )
    assert (found.stored.tolist(), found.removed.tolist(), found.cleared) == ([2], [1], False)
    found = kv_events([BlockRemoved(0, key(1)), AllCleared(), BlockStored(0, key(3))])
    assert (found.stored.tolist(), found.removed.tolist(), found.cleared) == ([3], [], True)


def test_events_cross_to_the_front_end():
    sent = kv_events([BlockStored(0, b"\xff" * 32), BlockRemoved(1, key(7))])
    got = Decoder(CoreMessage).decode(Encoder().encode(sent))
    assert (got.stored.tolist(), got.removed.tolist(), got.cleared) == ([-1], [7], False)


def test_the_longest_prefix_of_each_rank_is_found():
    view = PrefixView([3, 4, 5], BLOCK)
    prompt = np.arange(17, dtype=np.int32)
    ranks = {3: memory(), 4: memory()}
    run(ranks[3], prompt[:9])
    run(ranks[4], prompt)
    for rank, made in ranks.items():
        view.update(rank, kv_events(made.pool.events()))
    assert view.cached_tokens(prompt_keys(prompt, BLOCK)).tolist() == [8, 16, 0]
    assert view.cached_tokens(prompt_keys(prompt[:6], BLOCK)).tolist() == [4, 4, 0]
    # The last token of a prompt is always computed.
    assert view.cached_tokens(prompt_keys(prompt[:8], BLOCK)).tolist() == [4, 4, 0]
    assert view.cached_tokens(prompt_keys(prompt[1:], BLOCK)).tolist() == [0, 0, 0]


def test_requests_of_another_salt_share_nothing():
    view, made = PrefixView([0], BLOCK), memory()
    prompt = np.arange(9, dtype=np.int32)
    run(made, prompt, "a")
    view.update(0, kv_events(made.pool.events()))
    assert view.cached_tokens(prompt_keys(prompt, BLOCK, "a")).tolist() == [8]
    assert view.cached_tokens(prompt_keys(prompt, BLOCK, "b")).tolist() == [0]
    assert view.cached_tokens(prompt_keys(prompt, BLOCK)).tolist() == [0]


def test_who_joins_late_gets_all_keys():
    made = memory()
    prompt = np.arange(13, dtype=np.int32)
    run(made, prompt)
    made.pool.events()
    view = PrefixView([0], BLOCK)
    view.update(0, all_keys(made.pool))
    assert view.cached_tokens(prompt_keys(prompt, BLOCK)).tolist() == [12]


def test_a_rank_that_is_cleared_leaves_the_others():
    view = PrefixView([0, 1], BLOCK)
    prompt = np.arange(9, dtype=np.int32)
    for rank in (0, 1):
        made = memory()
        run(made, prompt)
        view.update(rank, kv_events(made.pool.events()))
    view.clear(0)
    assert view.cached_tokens(prompt_keys(prompt, BLOCK)).tolist() == [0, 8]
    view.clear(1)
    assert len(view) == 0


prompts = st.lists(st.integers(0, 2), min_size=1, max_size=40).map(lambda ids: np.array(ids, np.int32))


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 1), prompts, st.booleans()), max_size=30), prompts)
def test_it_knows_what_the_memories_would_find(runs, asked):
    """Evictions among them, as each memory has 12 blocks."""
    view = PrefixView([0, 1], BLOCK)
    memories = [memory(12), memory(12)]
    for rank, prompt, reset in runs:
        if reset:
            memories[rank].reset()
        run(memories[rank], prompt)
        view.update(rank, kv_events(memories[rank].pool.events()))
    expected = [made.cached_tokens(made.prefix(asked)) for made in memories]
    assert view.cached_tokens(prompt_keys(asked, BLOCK)).tolist() == expected
