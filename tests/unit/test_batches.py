"""Samples to a target by batch: the law, its interval, and published points."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fullwire.convergence.batches import USUAL_SPREAD, Critical, Point, fit_batches
from fullwire.errors import DamagedInput, UsageError
from validation import reference_points, tables


def of_law(batch: float, *, least: float = 1000.0, critical: float = 100.0) -> Point:
    return Point(batch=batch, samples=least * (1 + batch / critical))


def test_points_on_a_law_give_it_back() -> None:
    law = fit_batches([of_law(batch) for batch in (10, 50, 200, 800)])
    middle, low, high = law.samples(np.array([100.0]))
    assert middle[0] == pytest.approx(2000, rel=0.02)
    assert low[0] < 2000 < high[0]
    assert law.critical_between()[0] == pytest.approx(100, rel=0.1)


def test_larger_batches_need_no_fewer_samples_and_are_less_sure() -> None:
    law = fit_batches([of_law(10), of_law(40)])
    middle, low, high = law.samples(np.array([40.0, 160.0, 640.0]))
    assert (np.diff(middle) > 0).all()
    assert (np.diff(high / low) > 0).all()


def test_the_law_itself_is_less_sure_beyond_the_recorded_batches() -> None:
    """An exact critical batch leaves the points, one new run, and the law's own error."""
    law = fit_batches([of_law(100), of_law(200)], Critical(batch=100, factor=1))
    middle, low, high = law.samples(np.array([12.5, 100.0, 150.0, 200.0, 1600.0]))
    width = np.log(high / low)
    assert width[1:4] == pytest.approx(width[1])  # between them it is not
    assert width[0] == pytest.approx(width[4])
    assert width[0] > 2 * width[1]
    assert middle == pytest.approx([of_law(b).samples for b in (12.5, 100, 150, 200, 1600)])


def test_many_batches_agree_with_few() -> None:
    law = fit_batches([of_law(10), of_law(40)])
    many = law.samples(np.geomspace(10, 1000, 500))[0]
    assert many[[0, -1]] == pytest.approx(law.samples(np.array([10.0, 1000.0]))[0], rel=1e-6)


def test_batches_too_far_beyond_the_recorded_ones_are_named() -> None:
    law = fit_batches([of_law(10), of_law(40)])
    assert law.is_far(np.array([160.0, 161.0])).tolist() == [False, True]


def test_one_run_needs_a_critical_batch_from_elsewhere() -> None:
    with pytest.raises(UsageError, match="expected runs at two batches or more"):
        fit_batches([of_law(10)])
    exact = fit_batches([of_law(10)], Critical(batch=100, factor=1))
    rough = fit_batches([of_law(10)], Critical(batch=100, factor=2.5))
    at = np.array([400.0])
    assert exact.samples(at)[0][0] == pytest.approx(5000, rel=0.01)
    ratios = [float(high[0] / low[0]) for _, low, high in (exact.samples(at), rough.samples(at))]
    assert ratios[0] < ratios[1]


@pytest.mark.parametrize(("of_a_batch", "cv"), [(3, 0.15), (5, 0.15), (5, 0.3)])
def test_runs_of_one_batch_show_how_far_a_new_run_may_be_off(of_a_batch: int, cv: float) -> None:
    random = np.random.default_rng(0)
    at = np.array([128.0, 256.0])
    inside = []
    for _ in range(200):
        recorded = [of_law(batch) for batch in (64, 256) for _ in range(of_a_batch)]
        off = np.exp(cv * random.normal(size=len(recorded)))
        points = [
            replace(point, samples=point.samples * times)
            for point, times in zip(recorded, off.tolist(), strict=True)
        ]
        _, low, high = fit_batches(points).samples(at)
        new = np.array([of_law(b).samples for b in at]) * np.exp(cv * random.normal(size=2))
        inside += ((low <= new) & (new <= high)).tolist()
    assert 0.88 <= np.mean(inside) <= 0.97


def test_a_spread_that_a_curve_was_read_with_is_not_that_of_runs() -> None:
    """Two runs that lie as far apart as their curves are unsure show no spread of their own."""
    apart = [Point(batch=64, samples=samples, reading=0.2) for samples in (1000.0, 1200.0)]
    sure = [replace(point, reading=0.0) for point in apart]
    other = Point(batch=256, samples=2000)
    assert fit_batches([*apart, other]).run_variance < USUAL_SPREAD**2
    assert fit_batches([*sure, other]).run_variance > 4 * USUAL_SPREAD**2


@pytest.mark.parametrize("critical", [20_000, 1e6])
def test_batches_far_below_the_critical_one_tell_no_largest_critical_batch(critical: float) -> None:
    law = fit_batches([of_law(64, critical=critical), of_law(256, critical=critical)])
    _, low, high = law.critical_between()
    assert 256 < low < critical < high == np.inf
    at = np.array([128.0, 1024.0, 8192.0])
    _, least, most = law.samples(at)
    truth = 1000 * (1 + at / critical)
    assert ((least < truth) & (truth < most)).all()
    assert least[2] < 1000  # even a critical batch without end is inside


def test_batches_around_the_critical_one_tell_both_ends_of_it() -> None:
    law = fit_batches([of_law(64), of_law(256)])
    assert law.critical_between()[2] < 400
    assert law.endless is None


def test_a_spread_that_is_a_slip_changes_little() -> None:
    points = [of_law(10), of_law(40), of_law(160)]
    slip = Point(batch=640, samples=7400, runs=7, spread=3000.0)
    law = fit_batches([*points, slip])
    assert law.samples(np.array([640.0]))[0][0] == pytest.approx(7400, rel=0.05)


def test_mlperfs_points_are_predicted_from_their_neighbours(shared_data: Path) -> None:
    curves = reference_points.curves(shared_data / "accuracy" / "mlperf_rcp.csv")
    assert len(curves) == 17
    found = [
        each for name, curve in curves.items() for each in reference_points.left_out(curve, name)
    ]
    assert np.median([abs(each.error) for each in found]) < 0.04
    assert 0.88 <= np.mean([each.is_inside for each in found]) <= 0.97
    assert 0.90 <= (reference_points.coverage_beyond(curves) or 0) <= 0.95


def test_a_benchmark_of_many_batches_is_predicted_a_bounded_number_of_times() -> None:
    """47,445 predictions of a curve of 80 batches took half a minute."""
    few, many = (
        tuple(of_law(batch) for batch in np.geomspace(16, 16_000, count)) for count in (10, 80)
    )
    found = reference_points.beyond(many, "x")
    assert 800 <= len(found) <= 1000
    assert len({each.batch for each in found}) > 60  # from all over the curve
    batches = [point.batch for point in few]
    every = [
        batch
        for first, second in itertools.combinations(batches, 2)
        if 2 <= second / first <= 8
        for batch in batches
        if batch > 2 * second or batch < first / 2
    ]
    assert sorted(each.batch for each in reference_points.beyond(few, "x")) == sorted(every)
    assert len(reference_points.beyond(few, "x", most=6)) <= 6


def test_of_many_batches_some_are_left_out_and_the_largest_is_among_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A benchmark of 3,000 batches took a minute: each was predicted from all others."""
    monkeypatch.setattr(reference_points, "_MOST_LEFT_OUT", 10)
    many = tuple(of_law(batch) for batch in np.geomspace(16, 16_000, 40))
    told: list[None] = []
    found = reference_points.left_out(many, "x", lambda: told.append(None))
    assert len(found) == len(told) == 10
    assert [each.is_largest for each in found] == [False] * 9 + [True]
    assert found[0].batch < 40  # from all over the curve


def test_points_in_two_units_and_in_steps_become_curves_in_samples(tmp_path: Path) -> None:
    path = tmp_path / "points.csv"
    lines = ["suite,benchmark,batch,n,olympic_mean,std"]
    lines += [f"1,mixed,{batch},5,{100 * (1 + batch / 50)},1" for batch in (10, 20, 40)]
    lines += [f"1,mixed,{batch},5,{16800 * (1 + batch / 50)},9" for batch in (80, 160, 320)]
    lines += [f"1,steps,{batch},5,{9000 * (1 + batch / 50) / batch},9" for batch in (10, 20, 40)]
    path.write_text("\n".join(lines))
    curves = reference_points.curves(path)
    assert {name: len(curve) for name, curve in curves.items()} == {
        "mixed": 3,
        "mixed (2)": 3,
        "steps": 3,
    }
    assert curves["steps"][2].samples == pytest.approx(9000 * 1.8)


@pytest.mark.parametrize(
    ("unit", "values", "samples"),
    [
        ("Epochs to converge", [20, 16, 13.5], [20, 16, 13.5]),
        ("Epochs to converge", [5000, 2800, 1950], [5000 * 64, 2800 * 128, 1950 * 256]),
        ("samples to converge", [5000, 2800, 1950], [5000, 2800, 1950]),
        ("Steps to converge", [5000, 4800, 4700], [5000 * 64, 4800 * 128, 4700 * 256]),
        ("", [5000, 4800, 4700], [5000, 4800, 4700]),
        ("", [20, 16, 13.5], [20 * 64, 16 * 128, 13.5 * 256]),
    ],
)
def test_a_unit_that_says_what_it_counts_is_believed(
    unit: str, values: list[float], samples: list[float], tmp_path: Path
) -> None:
    path = tmp_path / "points.csv"
    lines = ["suite,benchmark,batch,n,olympic_mean,std,unit"]
    lines += [
        f"1,x,{batch},20,{value},,{unit}"
        for batch, value in zip((64, 128, 256), values, strict=True)
    ]
    path.write_text("\n".join(lines))
    [curve] = reference_points.curves(path).values()
    assert [point.samples for point in curve] == pytest.approx(samples)


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
@pytest.mark.parametrize("nothing", ["", "-", "N/A", "nan"])
def test_tables_of_spreadsheets_are_read_as_plain_ones(
    delimiter: str, nothing: str, tmp_path: Path
) -> None:
    """A spread that nobody measured, or a comma between thousands, refused the table."""
    path = tmp_path / "points.csv"
    rows = [("suite", "benchmark", "batch", "n", "olympic_mean", "std")]
    for batch in (512, 1024, 2048):
        shown = f"{batch}" if delimiter == ";" else f'"{batch:,}"'
        rows.append(("1", "x", shown, nothing, f"{10 + batch / 100}", nothing))
    path.write_text("\n".join(delimiter.join(cells) for cells in rows))
    [curve] = reference_points.curves(path).values()
    assert [point.batch for point in curve] == [512, 1024, 2048]
    assert {(point.runs, point.spread) for point in curve} == {(1, 0)}


def test_a_comma_that_may_be_a_decimal_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "points.csv"
    path.write_text("suite;benchmark;batch;n;olympic_mean;std\n1;x;64;1;26,125;1\n")
    with pytest.raises(DamagedInput, match="olympic_mean: expected a number above 0, got '26,125'"):
        reference_points.curves(path)


@pytest.mark.parametrize(
    ("batch", "beside", "is_thousands"),
    [
        ("1,234", "0.5", True),
        ("1,234", "12.75", True),
        ("1,234", "3", False),  # nothing tells what the comma is
        ("1,234", "0,5", False),
        ("1,234", "2.500", False),  # it may be 2,500 with a decimal comma in the batch
        ("0,125", "0.5", False),
    ],
)
def test_a_comma_in_a_table_with_tabs_stands_between_thousands_beside_decimal_points(
    batch: str, beside: str, is_thousands: bool, tmp_path: Path
) -> None:
    path = tmp_path / "a.tsv"
    path.write_text(f"batch\tother\n{batch}\t{beside}\n")
    [row] = tables.read(path, ("batch",))
    if is_thousands:
        assert row.number("batch") == 1234
    else:
        with pytest.raises(DamagedInput, match=f"batch: expected a number above 0, got '{batch}'"):
            row.number("batch")


def test_a_decimal_comma_is_no_comma_between_thousands(tmp_path: Path) -> None:
    """A value of 0,125 was read as 125."""
    path = tmp_path / "a.csv"
    path.write_text('a,b\n"0,125","12,345.5"\n')
    [row] = tables.read(path, ("a", "b"))
    assert row.number("b") == 12345.5
    with pytest.raises(DamagedInput, match="a: expected a number above 0, got '0,125'"):
        row.number("a")


def test_the_delimiter_is_one_that_gives_the_columns(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("a,b (x;y;z)\n1,2\n")
    [row] = tables.read(path, ("a",))
    assert row.number("a") == 1


@pytest.mark.parametrize("rows", [("10,10,1", "30,30,3"), ("30,30,3", "10,10,1")])
def test_rows_of_one_batch_are_one_point_by_their_runs(
    rows: tuple[str, str], tmp_path: Path
) -> None:
    path = tmp_path / "points.csv"
    lines = ["suite,benchmark,batch,n,olympic_mean,std"]
    lines += [f"1,x,64,{row}" for row in rows] + ["1,x,128,5,26,1", "1,x,256,5,28,1"]
    path.write_text("\n".join(lines))
    [first, *_] = reference_points.curves(path)["x"]
    assert (first.runs, first.samples) == (40, 25)
    within, between = (10 * 1 + 30 * 9) / 40, (10 * 15**2 + 30 * 5**2) / 40
    assert first.spread == pytest.approx((within + between) ** 0.5 / 25)


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        ("256,20,,1", "olympic_mean: expected a number above 0, got ''"),
        ("256,20,NaN,1", "olympic_mean: expected a number above 0, got 'NaN'"),
        ("abc,20,5,1", "batch: expected a number above 0, got 'abc'"),
        ("0,20,5,1", "batch: expected a number above 0, got '0'"),
        ("256,20,5,-1", "std: expected a number, 0 or above, got '-1'"),
    ],
)
def test_a_point_that_is_no_number_is_refused_with_its_line(
    cells: str, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "points.csv"
    path.write_text(f"suite,benchmark,batch,n,olympic_mean,std\nt,bert,128,,5,\nt,bert,{cells}\n")
    with pytest.raises(DamagedInput) as refused:
        reference_points.curves(path)
    assert str(refused.value) == f"{path}:3: {said}"
