"""Files with traces of real devices: how they are read, and what is refused."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from fedemu.ops.experiment.trace_files import RecordedAvailability, Rows, read_availability, read_compute, read_network
from fedemu.protocol.errors import ConfigurationError

PHONES = """device_id,policy,start_s,end_s,state,bootstrap
1,wifi,0,300,train,1
1,wifi,50,70,train,0
1,wifi,10,20,train,0
1,wifi,60,80,train,0
2,wifi,0,300,train,1
2,wifi,5,9,eval,0
1,battery,1,2,train,0
3,wifi,40,,train,0
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def write(folder: Path, text: str, name: str = "trace.csv") -> Path:
    path = folder / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


@pytest.mark.parametrize("name", ["trace.csv", "trace.csv.gz"])
def test_rows_are_filtered_sorted_and_joined_and_a_device_without_any_stays_in_its_place(
    folder: Path, name: str
) -> None:
    trace = read_availability(write(folder, PHONES, name), "wifi")
    assert trace == RecordedAvailability(((10.0, 20.0, 50.0, 80.0), (), (40.0,)), last_event=80.0)


def test_another_policy_state_or_the_artificial_rows_can_be_asked_for(folder: Path) -> None:
    path = write(folder, PHONES)
    assert read_availability(path, "battery").devices == ((1.0, 2.0), (), ())
    assert read_availability(path, "wifi", state="eval").devices == ((), (5.0, 9.0), ())
    assert read_availability(path, "wifi", bootstrap=True).devices == ((0.0, 300.0), (0.0, 300.0), (40.0,))


def test_three_columns_are_enough(folder: Path) -> None:
    trace = read_availability(write(folder, "device,start,end\na,1.5,2\nb,0,4\na,3,5\n"))
    assert trace == RecordedAvailability(((1.5, 2.0, 3.0, 5.0), (0.0, 4.0)), last_event=5.0)


@pytest.mark.parametrize("name", ["trace.csv", "trace.csv.gz"])
def test_a_byte_order_mark_is_no_part_of_a_name(folder: Path, name: str) -> None:
    assert read_availability(write(folder, "\ufeffdevice,start,end\na,1,2\n", name)).devices == ((1.0, 2.0),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("device,end\na,1\n", "has no column start_s or start; it has device, end"),
        ("device,start,end\n", "holds no rows"),
        ("", "holds no rows"),
        ("device,start,end\na,1\n", "line 2 has 2 values, but the header has 3"),
        ("device,start,end\na,1,2\na,x,3\n", "line 3: 'x' is not a number"),
        ('device,start,end\n"a\nb",1,2\n\n"c\r\nd",x,3\n', "line 5: 'x' is not a number"),
        ("device,start,end\na,-1,3\n", "line 2: -1 must be finite and not negative"),
        ("device,start,end\na,0,1e300\nb,1,2\n", "line 2: 1e300 must be 0 or from 1e-50 to 1e+50"),
        ("device,start,end\na,0,1e18\nb,1,2\n", "line 2: 1e18 is no time, which is in seconds and at most 1e+13"),
        ("device,start,end\na,5,3\n", "line 2: the interval ends at 3, before its start 5"),
        ("device,start,end,state\na,1,3,eval\n", "has no interval of state 'train' in which a device is on-line"),
        ("device,start,end\na,1,1\n", "trace.csv has no interval in which a device is on-line"),
        ("device,start,end,bootstrap\na,1,2,1\n", "has no interval of bootstrap '0' in which a device is on-line"),
        (PHONES, "has several policies; set policy to one of wifi, battery"),
    ],
)
def test_a_bad_trace_is_refused_with_its_line(folder: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=r"trace\.csv") as caught:
        read_availability(write(folder, text))
    assert message in str(caught.value)


def test_an_unknown_policy_is_refused_with_the_known_ones(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match='has no policy "wfi"; it has wifi, battery'):
        read_availability(write(folder, PHONES), "wfi")


def test_a_file_that_is_no_csv_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="there is no file"):
        read_availability(folder / "nowhere.csv")
    broken = folder / "broken.csv.gz"
    broken.write_bytes(b"device,start,end\n")
    with pytest.raises(ConfigurationError, match="can't be read as CSV"):
        read_availability(broken)
    binary = folder / "binary.csv"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigurationError, match="can't be read as CSV"):
        read_availability(binary)


@pytest.mark.parametrize("number", ["1e-320", "1e308"])
def test_numbers_that_cannot_be_multiplied_are_refused_with_their_line(folder: Path, number: str) -> None:
    path = write(folder, f"kBps,count\n1,1\n{number},1\n2,{number}\n")
    with pytest.raises(ConfigurationError, match=r"trace\.csv line 3: .* must be 0 or from 1e-50 to 1e\+50"):
        read_compute(path, "kBps", median=0.01)
    with pytest.raises(ConfigurationError, match=r"trace\.csv line 3: .* must be 0 or from 1e-50 to 1e\+50"):
        read_network(path, "kBps")
    with pytest.raises(ConfigurationError, match=r"trace\.csv line 4: .* must be 0 or from 1e-50 to 1e\+50"):
        read_compute(path, "count", median=0.01, weight="count")


def test_kilobytes_become_kilobits(folder: Path) -> None:
    path = write(folder, "down_mean_kBps,down_std_kBps,up_kbps\n100,10,7\n200,0,8\n")
    assert read_network(path, "down_mean_kBps", "down_std_kBps") == Rows((800.0, 1600.0), (80.0, 0.0), (1.0, 1.0))
    assert read_network(path, "up_kbps") == Rows((7.0, 8.0), (0.0, 0.0), (1.0, 1.0))


def test_the_device_of_the_median_score_takes_the_median_time_and_a_better_one_less(folder: Path) -> None:
    path = write(folder, "ai_score,count\n100,1\n200,1\n400,1\n")
    assert read_compute(path, "ai_score", median=0.01).values == pytest.approx((0.02, 0.01, 0.005))


def test_the_median_is_that_of_the_weighted_population(folder: Path) -> None:
    path = write(folder, "ai_score,count\n100,3\n200,1\n400,1\n800,0\n")
    rows = read_compute(path, "ai_score", median=0.01, weight="count")
    assert rows.values[0] == pytest.approx(0.01)
    assert rows.weights == (3.0, 1.0, 1.0, 0.0)
    even = write(folder, "ai_score\n100\n300\n")
    assert read_compute(even, "ai_score", median=0.01).values == pytest.approx((0.02, 0.02 / 3))


def test_profiles_that_make_no_sense_are_refused(folder: Path) -> None:
    path = write(folder, "speed,count\n0,0\n5,0\n")
    with pytest.raises(ConfigurationError, match="the column speed holds 0, but all values must be above 0"):
        read_network(path, "speed")
    with pytest.raises(ConfigurationError, match="has no column sped; it has speed, count"):
        read_network(path, "sped")
    good = write(folder, "speed,count\n1,0\n5,0\n")
    with pytest.raises(ConfigurationError, match="the column count gives no row a positive weight"):
        read_compute(good, "speed", 0.01, weight="count")
