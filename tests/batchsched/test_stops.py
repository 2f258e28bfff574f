import numpy as np

from batchsched.stops import StopIds


def hits(stops, *pairs):
    rows, tokens = zip(*pairs)
    return stops.hit(np.array(rows), np.array(tokens, np.int32)).tolist()


def test_each_row_has_its_own():
    stops = StopIds(4)
    stops.set(0, (5, 6))
    stops.set(2, (7,))
    assert hits(stops, (0, 5), (1, 5), (2, 5), (3, 5)) == [True, False, False, False]
    assert hits(stops, (2, 7), (0, 6)) == [True, True]


def test_none_at_all():
    assert hits(StopIds(2), (0, 0), (1, 2**31 - 1)) == [False, False]


def test_more_than_fit_the_columns():
    stops = StopIds(3)
    stops.set(0, tuple(range(100)))
    stops.set(1, (100,))
    assert hits(stops, (0, 99), (1, 99), (2, 99)) == [True, False, False]
    assert hits(stops, (0, 100), (1, 100), (2, 100)) == [False, True, False]


def test_a_row_forgets_the_last_request_s():
    stops = StopIds(2)
    stops.set(0, tuple(range(100)))
    stops.set(0, (1, 2, 3))
    assert hits(stops, (0, 99)) == [False]
    assert hits(stops, (0, 3)) == [True]
    stops.set(0, (4,))
    assert hits(stops, (0, 3)) == [False]
    assert hits(stops, (0, 4)) == [True]
    stops.set(0, ())
    assert hits(stops, (0, 4)) == [False]
