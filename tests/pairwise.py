"""Parameter combinations in which every two values of different parameters meet at least once.

Most faults need one value or two that meet, so these few combinations find nearly all that the whole product
finds (Kuhn, Wallace and Gallo, "Software fault interactions and implications for software testing", 2004).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest

Pair = tuple[tuple[int, int], tuple[int, int]]
"""Two (column, index), the lower column first."""


def all_pairs(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Rows of indices below `sizes` that hold every pair of indices of two columns, the same on every call.

    Greedy, as AETG (Cohen et al., 1997) without its random tries: a row begins with a missing pair, of
    columns with many missing pairs; each further column takes the index that adds most new pairs.
    """
    columns = range(len(sizes))
    if len(sizes) == 1:
        return [(index,) for index in range(sizes[0])]
    missing: set[Pair] = {
        ((one, first), (other, second))
        for one, other in combinations(columns, 2)
        for first, second in product(range(sizes[one]), range(sizes[other]))
    }
    seen: Counter[Pair] = Counter()
    rows = []
    while missing:
        left = Counter(column for pair in missing for column, _ in pair)
        row = dict(min(missing, key=lambda pair: (-sum(left[column] for column, _ in pair), pair)))
        for column in sorted(columns, key=lambda column: (-left[column], column)):
            if column not in row:
                row[column] = _best(column, sizes[column], row, seen)
        rows.append(tuple(row[column] for column in columns))
        seen.update(combinations(sorted(row.items()), 2))
        missing.difference_update(seen)
    return rows


def _best(column: int, size: int, row: Mapping[int, int], seen: Counter[Pair]) -> int:
    """The index that makes most new pairs with the row; among equals the one whose pairs were least seen."""

    def order(index: int) -> tuple[int, int, int]:
        mine = column, index
        counts = [seen[min((mine, other), (other, mine))] for other in row.items()]
        return -counts.count(0), sum(counts), index

    return min(range(size), key=order)


def parametrize_pairs(**parameters: Sequence[Any] | Mapping[str, Any]) -> pytest.MarkDecorator:
    """`pytest.mark.parametrize` of all pairs of values; a mapping gives its values names."""
    columns = [_named(values) for values in parameters.values()]
    rows = []
    for indices in all_pairs([len(column) for column in columns]):
        names, values = zip(*(column[index] for column, index in zip(columns, indices)))
        rows.append(pytest.param(*values, id="-".join(names)))
    return pytest.mark.parametrize(tuple(parameters), rows)


def _named(values: Sequence[Any] | Mapping[str, Any]) -> list[tuple[str, Any]]:
    if isinstance(values, Mapping):
        return list(values.items())
    return [(str(value).removeprefix("torch."), value) for value in values]
