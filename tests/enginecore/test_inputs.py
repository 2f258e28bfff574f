"""What the model is given for a step."""

import numpy as np
import pytest
import torch

from enginecore.worker.runner.inputs import build_inputs


def inputs(rows, starts, counts, tables, on_host=True):
    tables = np.array(tables, np.int32)
    tokens = torch.arange(40, dtype=torch.int32).view(4, 10)
    return build_inputs(
        np.array(rows),
        np.array(starts),
        np.array(counts),
        tokens=tokens,
        host_tokens=tokens.numpy() if on_host else None,
        block_tables=torch.from_numpy(tables),
        host_tables=tables,
        block_size=2,
    )


@pytest.mark.parametrize("on_host", [True, False])
def test_decodes_come_first_and_keep_their_order(on_host):
    made = inputs([2, 0, 3, 1], [0, 4, 1, 6], [3, 1, 2, 1], np.arange(20).reshape(4, 5), on_host)
    assert made.ids.dtype == torch.int64
    assert made.order.tolist() == [1, 3, 0, 2]
    assert made.ids.tolist() == [4, 16, 20, 21, 22, 31, 32]
    assert made.positions.tolist() == [4, 6, 0, 1, 2, 1, 2]
    assert made.batch.num_decodes == 2
    # Row 0's position 4 is the first of its third block, 2; row 1's position 6 the first of 8.
    assert made.batch.slots.tolist() == [4, 16, 20, 21, 22, 31, 32]
    assert made.last.tolist() == [0, 1, 4, 6]


def test_block_tables_of_neighbours_are_not_copied():
    tables = torch.arange(20, dtype=torch.int32).view(4, 5)

    def batch_of(rows, starts, counts):
        made = build_inputs(
            np.array(rows),
            np.array(starts),
            np.array(counts),
            tokens=torch.zeros(4, 10, dtype=torch.int32),
            host_tokens=None,
            block_tables=tables,
            host_tables=tables.numpy(),
            block_size=2,
        )
        return made.batch.block_table

    # The longest has six tokens, in three blocks.
    view = batch_of([3, 1, 2], [5, 4, 1], [1, 1, 1])
    assert view.tolist() == [[5, 6, 7], [10, 11, 12], [15, 16, 17]]
    assert view.data_ptr() == tables[1].data_ptr()
    assert batch_of([3, 1], [5, 4], [1, 1]).tolist() == [[5, 6, 7], [15, 16, 17]]
    assert batch_of([1, 2], [0, 5], [3, 1]).tolist() == [[10, 11, 12], [5, 6, 7]]
    assert batch_of([3], [5], [1]).data_ptr() == tables[3].data_ptr()


def test_a_prefix_that_all_rows_share_is_found():
    tables = [[7, 8, 1, 2, 0], [7, 8, 3, 4, 0], [7, 8, 5, 0, 0], [9, 8, 6, 0, 0]]
    assert inputs([0, 1, 2], [6, 7, 4], [1, 1, 2], tables).batch.shared_prefix == 4
    # Row 2's first query is at position 3, in the second block.
    assert inputs([0, 1, 2], [6, 7, 3], [1, 1, 2], tables).batch.shared_prefix == 2
    assert inputs([0, 1, 3], [6, 7, 4], [1, 1, 1], tables).batch.shared_prefix == 0
    assert inputs([0], [6], [1], tables).batch.shared_prefix == 0


def test_blocks_that_a_row_of_the_step_fills_are_no_shared_prefix_yet():
    tables = [[7, 8, 1], [7, 8, 3], [7, 8, 5], [9, 8, 6]]
    assert inputs([0, 1, 2], [0, 4, 4], [5, 1, 2], tables).batch.shared_prefix == 0
    assert inputs([0, 1, 2], [2, 4, 4], [3, 1, 2], tables).batch.shared_prefix == 2
