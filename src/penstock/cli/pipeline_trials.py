"""`penstock pipeline test` and `preview`: a pipeline's steps, without its stream."""

import json
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from penstock.cli import JsonOutput, Positive, Token, say
from penstock.cli.pipeline import File, LoggedSpark, commands, load_file, reporting
from penstock.cli.tables import Column, TableBlock, View
from penstock.errors import PenstockError


@commands.command(name="test")
def trial(
    file: File,
    /,
    *,
    given: Annotated[Path, Parameter(name="--input")],
    expect: Path | None = None,
    spark: LoggedSpark = LoggedSpark(),
) -> None:
    """Run the steps of a pipeline on given rows, in memory, and compare the result.

    It needs no broker and writes nothing. Without --expect, it prints the rows, one JSON object per
    line. With --expect, it prints the differences, if any, and exits with 1. The order of rows does
    not matter.

    Example: `penstock pipeline test orders.yaml --input rows.json --expect big.json`

    :param given: JSON file with the rows of the source, or of each source by name.
    :param expect: JSON file with the expected rows of the last step, or of each view by name.
    """
    spark.show_log()
    with reporting():
        from penstock.pipeline import trial as steps
        from penstock.pipeline.pipeline_file import load
        from penstock.pipeline.validation import check

        pipeline = load(file)
        rows = steps.given_rows(pipeline, _read(given), str(given))
        expected = (
            steps.expected_rows(pipeline, _read(expect), str(expect)) if expect is not None else {}
        )
        check(pipeline, ask_broker=False)
        made = steps.on_rows(spark.session("test")(), pipeline, rows)
        if expect is None:
            for row in steps.rows_of(made, next(reversed(made.views))):
                print(json.dumps(row, ensure_ascii=False))
            return
        differences = steps.compare(made, expected)
    for one in differences:
        for row in one.missing:
            say(f"{one.view}: missing    {json.dumps(row, ensure_ascii=False)}")
        for row in one.unexpected:
            say(f"{one.view}: unexpected {json.dumps(row, ensure_ascii=False)}")
    if differences:
        raise SystemExit(1)
    print(f"{file}: {', '.join(expected)} as expected")


@commands.command
def preview(
    file: File,
    /,
    *,
    rows: Annotated[int, Parameter(validator=Positive)] = 5,
    records: Annotated[int, Parameter(validator=Positive)] = 1000,
    token: Token = "",
    spark: LoggedSpark = LoggedSpark(),
    output: JsonOutput = JsonOutput(),  # noqa: ARG001  # `run` reads it
) -> View:
    """Show the first rows of each source and step, computed from the first records of the sources.

    It writes nothing and commits no offsets.

    Example: `penstock pipeline preview orders.yaml --rows 3`

    :param rows: Rows to show per step.
    :param records: Records to read per source.
    """
    spark.show_log()
    with reporting():
        from penstock.pipeline import trial as steps
        from penstock.pipeline.validation import check

        pipeline = load_file(file, token)
        check(pipeline)
        made = steps.on_first_records(spark.session("preview")(), pipeline, records)
        views = {view: steps.rows_of(made, view, limit=rows) for view in made.views}
    return View(views, [_table(view, some) for view, some in views.items()])


def _table(view: str, rows: list[dict[str, Any]]) -> TableBlock:
    names = dict.fromkeys(name for row in rows for name in row)
    columns = [Column(name, partial(_cell, name), prose=True) for name in names]
    return TableBlock([Column(view, lambda _: ""), *columns], rows, f"{view}: no rows")


def _cell(name: str, row: dict[str, Any]) -> str:
    value = row[name]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise PenstockError(f"{path}: {error.strerror}") from None
