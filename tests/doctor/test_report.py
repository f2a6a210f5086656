"""The report of a check-up says every thing once."""

from __future__ import annotations

from posttrain.doctor.case import ERROR, NOTE, WARNING, Finding, Report


def test_the_same_words_from_two_areas_are_one_finding_and_another_level_is_another():
    report = Report()
    report.add([Finding(ERROR, "memory", "no GPU"), Finding(ERROR, "time", "no GPU", "elsewhere")])
    report.add([Finding(NOTE, "data", "no GPU"), Finding(ERROR, "data", "no rows")])
    assert [(found.level, found.area) for found in report.findings] == [
        (ERROR, "memory"), (NOTE, "data"), (ERROR, "data"),
    ]  # fmt: skip


def test_a_note_is_left_out_of_the_page_where_a_warning_says_the_same():
    report = Report()
    report.add([Finding(NOTE, "data", "the template is deaf"), Finding(NOTE, "data", "rows were dropped")])
    assert report.text().count("the template is deaf") == 1
    report.add([Finding(WARNING, "template", "the template is deaf")])
    page = report.text()
    assert page.count("the template is deaf") == 1 and "warning, template: the template is deaf" in page
    assert "data: rows were dropped" in page
