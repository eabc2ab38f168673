"""The `penstock` command: one module per group of commands, put together here."""

import typer

app = typer.Typer(
    name="penstock",
    help="A message broker for Python and data teams: queues on PostgreSQL, topics on disk, pipelines on Spark.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


def main() -> None:
    app()
