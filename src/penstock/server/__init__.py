"""The processes of one broker: the owner of the data directory (`process`) and those that serve
queues beside it (`workers`).

They live for months, and so they load nothing of the command line: `penstock serve` reads its
options, and then replaces itself by `process` (same process id), which does without typer and what
that needs, some 12 MiB.
"""

ORDER = "PENSTOCK_SERVE_ORDER"  # what `penstock serve` has read from its options, as JSON
