"""Files become rows: suffixes, origins, errors."""

import gzip
import json
import subprocess
import sys
import time
from datetime import datetime, timedelta, timezone, tzinfo

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from posttrain.data import DataError, load_rows, resolve_files
from posttrain.data.rows import plain

ROWS = [{"prompt": "一", "n": [1, 2]}, {"prompt": "b", "n": []}]


def write_parquet(path, rows):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize("suffix", ["parquet", "json", "jsonl", "json.gz", "jsonl.gz"])
def test_the_suffix_decides_the_reader(tmp_path, suffix):
    path = tmp_path / f"rows.{suffix}"
    lines = "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS) + "\n\n"
    text = lines if "jsonl" in suffix else json.dumps(ROWS, ensure_ascii=False)
    if suffix == "parquet":
        write_parquet(path, ROWS)
    else:
        path.write_bytes(gzip.compress(text.encode()) if suffix.endswith("gz") else text.encode())
    assert load_rows(str(path)).rows == ROWS


def test_json_lines_called_json_and_a_byte_order_mark_are_read(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text("\n".join(json.dumps(row) for row in ROWS), encoding="utf-8-sig")
    assert load_rows(path).rows == ROWS


def test_a_missing_file_is_named_in_under_two_seconds_without_torch(tmp_path):
    code = (
        "import sys; from posttrain.data import DataError, load_rows\n"
        f"try: load_rows({str(tmp_path / 'none.parquet')!r})\n"
        "except DataError as error: print(error)\n"
        "print('torch' in sys.modules)"
    )
    start = time.monotonic()
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert f"data.train_files: There is no file {tmp_path / 'none.parquet'}" in out
    assert out.strip().endswith("False") and time.monotonic() - start < 2


def test_all_missing_files_are_reported_together_with_the_command_that_makes_them(tmp_path):
    with pytest.raises(DataError) as error:
        resolve_files([tmp_path / "gsm8k" / "train.parquet", tmp_path / "b.json"], "data.val_files")
    assert "data.val_files" in str(error.value) and "b.json" in str(error.value)
    assert "python examples/data_preprocess/gsm8k.py" in str(error.value)


def test_home_is_expanded_in_both_spellings(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.json").write_text(json.dumps(ROWS))
    assert resolve_files(["~/a.json", "$HOME/a.json"]) == [tmp_path / "a.json"] * 2


def test_rows_of_several_files_keep_their_origin_and_the_limit_holds(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "1"}\n\n{"prompt": "2"}\n')
    write_parquet(tmp_path / "b.parquet", [{"prompt": "3"}, {"prompt": "4"}])
    table = load_rows([tmp_path / "a.jsonl", tmp_path / "b.parquet"])
    assert [row["prompt"] for row in table.rows] == ["1", "2", "3", "4"] and table.file_of == [0, 0, 1, 1]
    assert table.where(1) == f"row 3 of {tmp_path / 'a.jsonl'}"  # the line in the file
    assert table.where(2) == f"row 1 of {tmp_path / 'b.parquet'}"
    limited = load_rows([tmp_path / "a.jsonl", tmp_path / "b.parquet"], limit=3)
    assert len(limited) == 3 and len(limited.files) == 2


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"prompt": "1"}\n{"prompt": oops}\n', r"Line 2 of .*a\.jsonl is not valid JSON: .* column 12"),
        ("a.json", '[{"prompt": "1"},\n {]', r"a\.json is not valid JSON: .* at line 2, column 3"),
        ("a.json", '"text"', r"holds a str; it must be a JSON array"),
        ("a.json", '[{"prompt": "1"}, 5]', r"Row 2 of .*a\.json is a int"),
        ("a.json", "[]", r"no rows in .*a\.json"),
        ("a.jsonl", "", r"no rows"),
        ("a.parquet", "not parquet", r"a\.parquet cannot be read as parquet"),
        ("a.json.gz", "not gzip", r"a\.json\.gz cannot be read"),
        ("a.csv", "prompt\nx", r"suffix that is not known.*\.parquet, \.json, \.jsonl"),
    ],
)
def test_broken_files_are_errors_that_say_where(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        load_rows(tmp_path / name)


def test_a_folder_and_no_file_at_all_are_errors(tmp_path):
    (tmp_path / "train.json").write_text("[]")
    with pytest.raises(DataError, match=r"is a folder; name the files in it \(train\.json\)"):
        load_rows(tmp_path)
    for nothing in (None, [], ""):
        with pytest.raises(DataError, match=r"data\.train_files names no file"):
            load_rows(nothing)


def test_numpy_values_become_plain_python():
    value = plain({"a": np.array([[1, 2]]), "b": np.float64(0.5), "c": (np.int64(3), np.bool_(True)), "d": b"x"}, [])
    assert value == {"a": [[1, 2]], "b": 0.5, "c": [3, True], "d": b"x"}
    assert [type(item) for item in (value["b"], value["c"][0], value["c"][1])] == [float, int, bool]
    messages = np.array([{"role": "user", "content": "hi"}], dtype=object)
    assert plain(messages, []) == [{"role": "user", "content": "hi"}]


NANOSECONDS = "hold whole microseconds; round the column to microseconds, or save it as a text"


def one_column(path, values):
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a"], "odd": values}), path)
    return path


@pytest.mark.parametrize("kind", [pyarrow.timestamp("ns"), pyarrow.timestamp("ns", tz="UTC"), pyarrow.duration("ns")])
def test_nanoseconds_are_read_where_they_are_whole_microseconds_and_else_the_column_is_named(tmp_path, kind):
    table = load_rows(one_column(tmp_path / "whole.parquet", pyarrow.array([1_700_000_000_123_456_000], kind)))
    assert table.rows[0]["odd"].microsecond == 123456 if "time" in str(kind) else table.rows[0]["odd"]
    finer = one_column(tmp_path / "finer.parquet", pyarrow.array([1_700_000_000_123_456_789], kind))
    with pytest.raises(DataError, match=NANOSECONDS) as error:
        load_rows(finer)
    assert "finer.parquet" in str(error.value)


class Stamp(datetime):
    """What pandas makes of a moment: a datetime with nanoseconds."""

    nanosecond = 0

    def to_pydatetime(self):
        return datetime(*self.timetuple()[:6], self.microsecond, tzinfo=self.tzinfo)


class Zone(tzinfo):
    """A time zone of another library."""

    def utcoffset(self, when):
        return timedelta(hours=2)

    def dst(self, when):
        return None

    def tzname(self, when):
        return "Zone"


def test_times_of_other_libraries_become_those_of_python():
    moment = plain(Stamp(2024, 2, 29, 1, 2, 3, 4, tzinfo=Zone()), [])
    assert type(moment) is datetime and moment.tzinfo == timezone(timedelta(hours=2))
    assert moment.replace(tzinfo=None) == datetime(2024, 2, 29, 1, 2, 3, 4)
    finer = Stamp(2024, 2, 29)
    finer.nanosecond = 5
    with pytest.raises(ValueError, match=NANOSECONDS):
        plain(finer, [])
    assert plain(np.datetime64("2024-02-29T01:02:03.000004000"), []) == datetime(2024, 2, 29, 1, 2, 3, 4)
    assert plain(np.array(["2024-02-29", "NaT"], "M8[ns]"), []) == [datetime(2024, 2, 29), None]
    assert plain(np.timedelta64(1500, "ms"), []) == timedelta(seconds=1.5)
    with pytest.raises(ValueError, match=NANOSECONDS):
        plain(np.array([1], "m8[ns]"), [])


def test_rows_nested_too_deeply_are_named_and_deep_ones_are_read(tmp_path):
    def nested(levels):
        return "[" * levels + "]" * levels

    path = tmp_path / "deep.jsonl"
    path.write_text(f'{{"prompt": "a", "x": {nested(200)}}}')
    assert str(load_rows(path).rows[0]["x"]) == nested(200)
    path.write_text(f'{{"prompt": "a", "x": {nested(400)}}}')
    with pytest.raises(DataError, match=r"Row 1 of .*deep.jsonl has lists or objects more than 200 levels deep"):
        load_rows(path)


def test_keys_that_are_no_texts_stay_what_they_are():
    keys = {1: "a", (1, 2): "b", None: "c", "d": {2.5: "e"}}
    assert plain(keys, []) == keys
