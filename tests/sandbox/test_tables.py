"""Tables of pandas: tests and programs hand them to each other by value, and no program can use one of the tests."""

from __future__ import annotations

import json
import re
import zoneinfo
from datetime import timedelta, timezone

import numpy
import pytest
from forgeries import PATCH

from posttrain.sandbox import table_reader, tables, wire

pandas = pytest.importorskip("pandas")

TABLE = """
import pandas as pd
df = pd.DataFrame({"city": ["Rome", "Oslo", "Rome"], "sales": [3, 5, 4]})
expected = 4242
"""
RIGHT = {
    # Program, tests, and the mistake of a wrong variant: text, and what stands in its place.
    "groups": (
        "def f(df): return df.groupby('city')['sales'].sum()",
        TABLE + "sums = pd.Series([5, 7], index=pd.Index(['Oslo', 'Rome'], name='city'), name='sales')\n"
        "pd.testing.assert_series_equal(f(df), sums)",
        ("sum", "max"),
    ),
    "joins by functions of pandas": (
        "import pandas as pd\n"
        "def f(a, b): return pd.merge(a, b, on='city', how='left').sort_values('sales', ignore_index=True)",
        TABLE + "other = pd.DataFrame({'city': ['Rome'], 'land': ['IT']})\n"
        "pd.testing.assert_frame_equal(f(df, other), pd.DataFrame({'city': ['Rome', 'Rome', 'Oslo'], "
        "'sales': [3, 4, 5], 'land': ['IT', 'IT', None]}))",
        ("how='left'", "how='inner'"),
    ),
    "applies a function of its own": (
        "def f(df): return df.apply(lambda row: f\"{row['city']}{row['sales']}\", axis=1)",
        TABLE + "assert f(df).tolist() == ['Rome3', 'Oslo5', 'Rome4']\nassert f(df).equals(pd.Series(f(df).tolist()))",
        ("{row['sales']}", "-{row['sales']}"),
    ),
    "applies a function of the tests": (
        "def f(df, g): return df['sales'].map(g)",
        TABLE + "assert (f(df, lambda x: x * 2) == [6, 10, 8]).all()",
        ("map(g)", "map(abs)"),
    ),
    "pivots": (
        "def f(df): return df.pivot_table(index='city', values='sales', aggfunc=['min', 'count'])",
        TABLE + "r = f(df)\nassert isinstance(r.columns, pd.MultiIndex) and r.loc['Rome', ('min', 'sales')] == 3\n"
        "assert r.index.name == 'city' and r.shape == (2, 2)\nassert isinstance(r, pd.DataFrame)",
        ("'min'", "'max'"),
    ),
    "dates": (
        "import pandas as pd\ndef f(df): return df.set_index('day').resample('MS')['n'].sum(), df['day'].max()",
        "import pandas as pd\n"
        "df = pd.DataFrame({'day': pd.to_datetime(['2024-01-03', '2024-01-09', '2024-03-01']), 'n': [1, 2, 3]})\n"
        "months = pd.date_range('2024-01-01', periods=3, freq='MS', name='day')\n"
        "total, last = f(df)\npd.testing.assert_series_equal(total, pd.Series([3, 0, 3], index=months, name='n'), "
        "check_index_type=False)\nassert last == pd.Timestamp('2024-03-01') and type(last) is pd.Timestamp",
        ("max()", "min()"),
    ),
    "missing values": (
        "import pandas as pd\ndef f(df):\n    a = df['a'].fillna(df['a'].mean()).astype('Int64')\n"
        "    return a, df['b'].isna().sum(), pd.NaT",
        "import pandas as pd\ndf = pd.DataFrame({'a': pd.array([1, None, 3], dtype='Int64'), 'b': [None, 'x', 'y']})\n"
        "a, b, c = f(df)\nassert a.equals(pd.Series([1, 2, 3], dtype='Int64')) and b == 1 and pd.isna(c)",
        ("mean", "max"),
    ),
    "categories": (
        "import pandas as pd\ndef f(s): return pd.cut(s, [0, 2, 9], labels=['low', 'high'])",
        "import pandas as pd\nr = f(pd.Series([1, 5]))\nassert list(r) == ['low', 'high'] and r.cat.ordered\n"
        "assert r.dtype == pd.CategoricalDtype(['low', 'high'], ordered=True)",
        ("2", "0.5"),
    ),
    "values as an array of objects": (
        "def f(df): return df.values, df.iterrows(), df.columns.tolist()",
        TABLE + "values, rows, names = f(df)\nassert values.shape == (3, 2) and values[1].tolist() == ['Oslo', 5]\n"
        "assert [row['sales'] for _, row in rows] == [3, 5, 4] and names == ['city', 'sales']",
        ("df.values", "df.values[:2]"),
    ),
    "changes the table": (
        "def f(df):\n    df['twice'] = df['sales'] * 2\n    df.sort_values('sales', ascending=False, inplace=True)",
        TABLE + "alias = df\nassert f(df) is None\nassert alias['twice'].tolist() == [10, 8, 6]\n"
        "assert list(df.index) == [1, 2, 0]\n"
        "df['more'] = 1\nf(df.iloc[:1])\nassert 'more' in df",
        ("* 2", "* 3"),
    ),
    "changes the table after it has called the tests": (
        "def f(df, g): df['twice'] = df['sales'].map(g) + df.apply(lambda row: g(row), axis=1)",
        TABLE + "f(df, lambda x: x if isinstance(x, int) else x['sales'])\nassert df['twice'].tolist() == [6, 10, 8]",
        ("+", "-"),
    ),
    "returns the table that it was given": (
        "def f(df): return df",
        TABLE + "assert f(df) is df and f([df])[0] is df and f(df['sales']).name == 'sales'",
        ("return df", "return df.copy()"),
    ),
    "a class that works on tables": (
        "class Cleaner:\n    def __init__(self, df): self.df = df\n"
        "    def clean(self):\n        self.df = self.df.dropna()\n        return self\n"
        "    def count(self): return len(self.df)",
        TABLE + "df.loc[1, 'city'] = None\nc = Cleaner(df)\nassert c.count() == 3 and c.clean().count() == 2\n"
        "assert c.df.equals(df.dropna()) and len(df) == 3",
        ("dropna()", "head(1)"),
    ),
    "rows as named tuples": (
        "def f(rows): return [row.city + str(row.sales) for row in rows]",
        TABLE + "assert f(list(df.itertuples())) == ['Rome3', 'Oslo5', 'Rome4']",
        ("row.city", "'x'"),
    ),
}
CHEATS = {
    "has a table of the tests evaluate text": (
        "def f(df):\n    for level in range(40):\n"
        "        try: return df.agg('eval', 0, '@expected', level=level)\n        except Exception: pass",
        "f(df) == expected",
    ),
    "has a table of the tests pass itself on": (
        "def f(df):\n    found = []\n    df.pipe(lambda own: found.append(own.__class__.query))\n"
        "    for level in range(40):\n"
        "        try: return found[0](df, 'sales == @expected', level=level)\n        except Exception: pass",
        "f(df) == expected",
    ),
    "is a table that equals everything": (
        "import pandas as pd\nclass Own(pd.DataFrame):\n    def equals(self, other): return True\n"
        "    def __eq__(self, other): return True\ndef f(df): return Own({'a': [1]})",
        "f(df).equals(df)",
    ),
    "is a table that compares as equal": (
        "import pandas as pd\nclass Own(pd.DataFrame):\n    def __eq__(self, other): return True\n"
        "def f(df): return Own({'a': [1]})",
        "f(df) == expected",
    ),
    "has methods of tables": (
        "class Own:\n    def reset_index(self, **_): return self\n    def equals(self, other): return True\n"
        "def f(df): return Own()",
        "f(df).reset_index(drop=True).equals(df)",
    ),
    "has a member that equals everything": (
        "import pandas as pd\nclass Own:\n    def __eq__(self, other): return True\n    __hash__ = None\n"
        "def f(df): return pd.Series([Own()] * 3)",
        "(f(df) == df['sales']).all()",
    ),
    "has members that an assertion of pandas compares": (
        "import pandas as pd\nclass Own:\n    def __eq__(self, other): return True\n    __hash__ = None\n"
        "def f(df): return pd.Series([Own()] * 3, name='sales', dtype=object)",
        "pd.testing.assert_series_equal(f(df), df['sales'].astype(object)) is None",
    ),
    "is a series that passes an assertion of pandas": (
        "import pandas as pd\nclass Own(pd.Series):\n    def __eq__(self, other): return True\n"
        "def f(df): return Own([1])",
        "pd.testing.assert_series_equal(f(df), df['sales']) is None",
    ),
}


ASKS_FOR_METHOD = (
    "import sys\nframe = sys._getframe()\nwhile '_Server' not in frame.f_globals: frame = frame.f_back\n"
    "do, servers = frame.f_globals['_Server']._perform, []\n"
    "def perform(self, request):\n    servers.append(self)\n    return do(self, request)\n"
    "frame.f_globals['_Server']._perform = perform\n"
    "def f(df):\n    me = servers[0]\n    number = me._remote_numbers[id(df)]\n"
    "    return me.ask('get', number, ('eval',))('@expected')"
)
FORGED = [
    "['frame', ['range', 0, 1 << 40, 1, None], ['range', 0, 1, 1, None], [[['numpy', '<i8'], [1]]], []]",
    "['frame', ['range', 0, 1, 1, None], ['range', 0, 2, 1, None], [[['numpy', '<i8'], [1]]], []]",
    "['series', ['range', 0, 1, 1, None], [['numpy', '<V8'], [1]], None, []]",
    "['series', ['range', 0, 1, 1, None], [['masked', 'Sparse[int]'], [[1], [False]]], None, []]",
    "['series', ['range', 0, 1, 1, None], [['category', ['index', [['numpy', 'O'], ['a']], None, None], False], [7]], "
    "None, []]",
    "['levels', [['range', 0, 1, 1, None]], [[5]], [None]]",
    "['levels', [['levels', [], [], []]], [[5]], [None]]",
    "['array', [['period', '__import__'], [1]]]",
    "['array', [['zoned', 'ns', ['zoneinfo', '../../etc/passwd']], [1]]]",
    "['array', [['zoned', 'ns', ['os', 'UTC']], [1]]]",
    "['timestamp', 'ns', 'now', None]",
    "['numpy', [1 << 60], [['numpy', '<i8'], [1]]]",
    "['numpy', [1], [['masked', 'Int64'], [[1], [False]]]]",
    "['query', 'expected']",
    "'frame'",
    "{}",
]


@pytest.fixture(scope="module")
def verdicts(roomy):
    """Right programs, wrong variants and cheating programs: each a function of one program, as pandas loads slowly."""
    right, wrong = ({name: (program, tests) for name, (program, tests, _) in RIGHT.items()} for _ in range(2))
    for name, (program, tests, (old, new)) in RIGHT.items():
        assert old in program
        wrong[name] = program.replace(old, new, 1), tests
    cheats = {name: (program, f"{TABLE}assert {statement}") for name, (program, statement) in CHEATS.items()}
    return [judge_together(roomy, programs) for programs in (right, wrong, cheats)]


def judge_together(box, programs):
    texts = [[numbered(text, number) for text in pair] for number, pair in enumerate(programs.values())]
    report = box.test("\n".join(program for program, _ in texts), [{"code": tests} for _, tests in texts])
    assert len(report.outcomes) == len(programs), report
    outcomes = sorted(report.outcomes, key=lambda outcome: outcome["test"])
    return dict(zip(programs, outcomes, strict=True))


def numbered(text, number):
    return re.sub(r"\bf\(", f"f{number}(", re.sub(r"\bOwn\b", f"Own{number}", text))


@pytest.mark.parametrize("name", RIGHT)
def test_right_program_passes_and_wrong_one_fails(name, verdicts):
    program, tests, _ = RIGHT[name]
    exec(f"{program}\n{tests}", {"__name__": "solution"})  # plain Python says the same
    right, wrong, _ = verdicts
    assert right[name]["passed"] is True, right[name]
    assert wrong[name]["passed"] is False and not wrong[name].get("unjudged"), wrong[name]


@pytest.mark.parametrize("name", CHEATS)
def test_cheating_program_fails(name, verdicts):
    outcome = verdicts[2][name]
    assert outcome["passed"] is False and not outcome.get("unjudged"), outcome


def test_request_for_a_method_of_a_table_ends_the_tests(roomy):
    report = roomy.test(ASKS_FOR_METHOD, [{"code": f"{TABLE}assert f(df) == expected"}] * 2)
    assert len(report.outcomes) == 1 and "a request to use a table" in report.outcomes[0]["error"], report


def test_what_could_run_text_is_not_handed_over(roomy):
    own = f"{TABLE}class Own(pd.DataFrame): pass\n"
    values = ["df.query", "df.groupby('city')", "df.loc", "Own(df)", "[df.apply]"]
    report = roomy.test("def f(x): return 1", [{"code": f"{own}assert f({value}) == 1"} for value in values])
    for outcome in report.outcomes:
        assert outcome["unjudged"] and "cannot be handed to the program" in outcome["error"], outcome
    assert len(report.outcomes) == len(values)


def test_forged_table_is_a_failure_and_stops_the_tests(roomy):
    lie = f"lambda fd, m: send(fd, {{'value': {{'table': {FORGED[0]}}}, 'changes': []}})"
    tests = "try: f(1)\nexcept Exception: pass\n"
    outcomes = roomy.test(f"{PATCH}\ndef f(x): wire.send = {lie}", [{"code": tests}] * 2).outcomes
    assert len(outcomes) == 1 and "no answer that can be read (ValueError" in outcomes[0]["error"], outcomes


@pytest.mark.parametrize("forged", FORGED)
def test_forged_table_is_not_rebuilt(forged):
    with pytest.raises((ValueError, TypeError, OverflowError)):
        table_reader.read(json.loads(json.dumps(eval(forged))), wire.decode)


def test_table_larger_than_a_message_is_a_failure(roomy):
    program = "import pandas as pd, numpy\ndef f(x): return pd.DataFrame(numpy.full((1000, 30000), .1))"
    report = roomy.test(program, [{"code": "assert f(1) is not None"}])
    assert not any(one["passed"] for one in report.outcomes), report


def test_pandas_is_not_imported_unless_it_is_used(roomy):
    program = "import sys\ndef f(x): return 'pandas' in sys.modules"
    tests = "import sys\nassert f([1]) is False and 'pandas' not in sys.modules"
    assert roomy.test(program, [{"code": tests}]).outcomes == [{"test": 0, "passed": True}]


def test_result_of_a_call_is_no_table(roomy):
    program = "import pandas as pd\ndef f(x): return pd.Series([x])"
    report = roomy.test(program, [{"call": "f", "args": [1]}])
    assert "value" not in report.outcomes[0] and "no plain data" in report.outcomes[0]["error"], report


def sent(value):
    """Send a value once through the form of messages."""

    def write(one):
        return wire.encode(one, refer, lambda one, content: refer(one) if tables.can_be_sent(one) else content())

    def refer(one):
        assert tables.can_be_sent(one), type(one)
        return tables.write(one, write)

    def read(data):
        return wire.decode(data, lambda tag, content: table_reader.read(content, read))

    return read(json.loads(json.dumps(write(value))))


def make_frame():
    days, pd = pandas.date_range("2024-01-01", periods=3), pandas
    columns = {
        "numbers": [1, 2, 3], "texts": ["x", "y", None], "reals": [1.5, float("nan"), 2.0], "days": days,
        "categories": pd.Categorical(["u", "v", "u"], ["v", "u", "w"], ordered=True), "utc": days.tz_localize("UTC"),
        "some": pd.array([1, None, 3], dtype="Int64"), "maybe": pd.array([True, None, False], dtype="boolean"),
        "strings": pd.array(["p", None, "q"], dtype="string"), "hours": pd.to_timedelta([1, 2, 3], unit="h"),
        "zoned": days.tz_localize("Europe/Berlin"), "offset": days.tz_localize(timezone(timedelta(hours=2))),
        "months": pd.period_range("2024-01", periods=3, freq="M"), "ranges": pd.interval_range(0, 3),
        "objects": pd.Series([[1], (1, 2), pd.Timestamp("2024-01-01")], dtype=object),
        "small": pd.array([1, 2, 3], dtype="uint8"),
        "reals that miss": pd.array([1.5, None, 2], dtype="Float64"), "truths": [True, False, True],
    }  # fmt: skip
    frame = pd.DataFrame(columns)
    frame.attrs["source"] = "tests"
    return frame


def make_parts():
    pd, frame = pandas, make_frame()
    yield from (frame, frame.iloc[:0], frame.drop(columns=frame.columns), frame.set_index(["texts", "days"]))
    yield from (
        pd.DataFrame(),
        pd.DataFrame([[1, 2]], columns=["a", "a"]),
        frame.groupby("texts").agg({"small": ["min"]}),
    )
    yield from (frame["texts"].value_counts(), frame["categories"].value_counts(), pd.Series([1], name=("a", 1)))
    yield from (
        pd.RangeIndex(5, name="n"),
        pd.Index([(1, 2), 3], tupleize_cols=False),
        pd.Index([1, None], dtype="Int64"),
    )
    yield from (pd.date_range("2024", periods=3, freq=freq, tz="Asia/Tokyo") for freq in ("MS", "2h", "W-SUN", "B"))
    yield from (
        pd.MultiIndex.from_product([[1, 2], ["a", "b"]], names=["x", None]),
        pd.timedelta_range("1h", periods=3),
    )
    yield from (pd.CategoricalIndex(["a", "b"]), pd.interval_range(0, 2), pd.period_range("2024", periods=2, freq="Q"))
    yield from (frame[name].array for name in frame.columns)


def test_parts_of_tables_are_rebuilt_exactly():
    for part in make_parts():
        back = sent(part)
        assert type(back) is type(part)
        if isinstance(part, pandas.DataFrame):
            pandas.testing.assert_frame_equal(back, part)
            assert back.attrs == part.attrs
        elif isinstance(part, pandas.Series):
            pandas.testing.assert_series_equal(back, part)
        elif isinstance(part, pandas.Index):
            pandas.testing.assert_index_equal(back, part, exact=True)
            assert getattr(back, "freq", None) == getattr(part, "freq", None)
        else:
            pandas.testing.assert_extension_array_equal(back, part)


def test_moments_types_and_arrays_are_rebuilt_exactly():
    pd = pandas
    berlin = zoneinfo.ZoneInfo("Europe/Berlin")
    moments = [pd.Timestamp("2024-01-01 00:00:00.123456789"), pd.Timestamp("1500-01-01"), pd.Timestamp(0, tz=berlin)]
    spans = [pd.Timedelta(5, "ns"), pd.Period("2024-01", "M"), pd.Interval(0, 1), numpy.datetime64("2024-01-01")]
    types = [one for one in make_frame().dtypes] + [pd.CategoricalDtype(), pd.CategoricalDtype(["a"], True)]
    for one in (*moments, *spans, *types):
        back = sent(one)
        assert type(back) is type(one) and back == one and str(back) == str(one), one
    assert sent(pd.NaT) is pd.NaT and sent(pd.NA) is pd.NA
    array = numpy.array([[1, "a"], [None, [2]]], dtype=object)
    assert sent(array).dtype == object and sent(array).tolist() == array.tolist()


def test_subclasses_and_unknown_columns_are_not_sent():
    class Own(pandas.DataFrame):
        pass

    frame = pandas.DataFrame({"a": [1]})
    sparse = pandas.Series(pandas.arrays.SparseArray([1]))
    unique = frame.set_flags(allows_duplicate_labels=False)
    for one in (Own(frame), sparse, sparse.to_frame(), unique, frame.groupby("a"), frame.loc, pandas.DataFrame):
        assert not tables.can_be_sent(one), one
