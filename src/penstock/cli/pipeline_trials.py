"""`penstock pipeline test` and `preview`: a pipeline's steps, without its stream."""

import json
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli import Token, option
from penstock.cli.pipeline import File, LoggedSpark, commands, load_file, reporting, say
from penstock.cli.tables import Column, Table, View
from penstock.errors import PenstockError


@commands.command("test")
def trial(
    file: File,
    spark: LoggedSpark,
    given: Annotated[
        Path, option("JSON file with the rows of the source, or of each source by name.", "--input")
    ],
    expect: Annotated[
        Path | None,
        option("JSON file with the expected rows of the last step, or of each view by name."),
    ] = None,
) -> None:
    """Run the steps of a pipeline on given rows, in memory, and compare the result.

    It needs no broker and writes nothing. Without --expect, it prints the rows, one JSON object per
    line. With --expect, it prints the differences, if any, and exits with 1. The order of rows does
    not matter.

    Example: `penstock pipeline test orders.yaml --input rows.json --expect big.json`
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
                typer.echo(json.dumps(row, ensure_ascii=False))
            return
        differences = steps.compare(made, expected)
    for one in differences:
        for row in one.missing:
            say(f"{one.view}: missing    {json.dumps(row, ensure_ascii=False)}")
        for row in one.unexpected:
            say(f"{one.view}: unexpected {json.dumps(row, ensure_ascii=False)}")
    if differences:
        raise typer.Exit(1)
    typer.echo(f"{file}: {', '.join(expected)} as expected")


@commands.command()
def preview(
    file: File,
    spark: LoggedSpark,
    rows: Annotated[int, option("Rows to show per step.", min=1)] = 5,
    records: Annotated[int, option("Records to read per source.", min=1)] = 1000,
    token: Token = "",
) -> View:
    """Show the first rows of each source and step, computed from the first records of the sources.

    It writes nothing and commits no offsets.

    Example: `penstock pipeline preview orders.yaml --rows 3`
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


def _table(view: str, rows: list[dict[str, Any]]) -> Table:
    names = dict.fromkeys(name for row in rows for name in row)
    columns = [Column(name, partial(_cell, name), prose=True) for name in names]
    return Table([Column(view, lambda _: ""), *columns], rows, f"{view}: no rows")


def _cell(name: str, row: dict[str, Any]) -> str:
    value = row[name]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise PenstockError(f"{path}: {error.strerror}") from None
