"""Background loops are restarted, logged and counted when they fail."""

import ast
import asyncio
import traceback
from pathlib import Path

import penstock
from penstock.io.tasks import cancelled, repeated, supervised
from penstock.metrics import Metrics
from tests.support.wait import eventually


async def test_a_loop_that_fails_is_logged_with_its_traceback_counted_and_started_again(caplog):
    metrics = Metrics()
    starts = 0

    async def loop() -> None:
        nonlocal starts
        starts += 1
        if starts < 3:
            raise RuntimeError("dictionary changed size during iteration")
        await asyncio.Event().wait()

    task = supervised("buffer replay", loop, metrics)
    await eventually(lambda: starts == 3)
    assert metrics.background_restarts.value("buffer replay") == 2
    assert b'penstock_background_restarts_total{task="buffer replay"} 2.0' in metrics.text()
    failures = [record.exc_info for record in caplog.records if record.exc_info]
    assert [str(info[1]) for info in failures] == ["dictionary changed size during iteration"] * 2
    assert "in loop" in "".join(traceback.format_exception(*failures[0]))
    await cancelled(task)
    assert task.cancelled()


async def test_a_loop_that_returns_is_over_and_one_that_is_cancelled_is_not_restarted():
    metrics = Metrics()
    starts = 0

    async def loop() -> None:
        nonlocal starts
        starts += 1

    await supervised("once", loop, metrics)
    assert starts == 1

    async def endless() -> None:
        await asyncio.Event().wait()

    task = supervised("endless", endless, metrics)
    await asyncio.sleep(0)
    await cancelled(task)
    assert metrics.background_restarts.current() == {}


async def test_a_call_that_is_repeated_is_called_again_after_it_failed(caplog):
    metrics = Metrics()
    calls = 0

    def call() -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("a bug")

    task = repeated("sweep", call, 0.001, metrics)
    await eventually(lambda: calls > 3)
    assert metrics.background_restarts.value("sweep") == 1
    assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == ["a bug"]
    await cancelled(task)


def test_no_timer_of_the_broker_starts_itself_again():
    """It would stop for good after one failure: `repeated` does not."""
    root = Path(penstock.__file__).parent
    alone = [
        f"{path.relative_to(root)}:{function.lineno} {function.name}"
        for path in root.rglob("*.py")
        if not path.is_relative_to(root / "client")
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.FunctionDef) and _starts_itself(function)
    ]
    assert alone == []


def _starts_itself(function: ast.FunctionDef) -> bool:
    """Whether the last statement calls `call_later` with the function itself, in any case."""
    return any(
        isinstance(call, ast.Call)
        and ast.unparse(call.func).endswith(("call_later", "call_at"))
        and any(ast.unparse(one) == f"self.{function.name}" for one in call.args)
        for call in ast.walk(function.body[-1])
    ) and not any(isinstance(node, ast.If | ast.Return) for node in ast.walk(function))


def test_no_endless_loop_of_the_broker_is_started_without_the_supervisor():
    root = Path(penstock.__file__).parent
    unsupervised = []
    for path in root.rglob("*.py"):
        if path.is_relative_to(root / "client"):
            continue
        for class_ in ast.walk(ast.parse(path.read_text())):
            if isinstance(class_, ast.ClassDef):
                loops = {
                    function.name
                    for function in class_.body
                    if isinstance(function, ast.AsyncFunctionDef) and _is_endless(function)
                }
                unsupervised += [
                    f"{path.relative_to(root)}:{call.lineno} {name}"
                    for call, name in _started(class_)
                    if name in loops
                ]
    assert unsupervised == []


def _is_endless(function: ast.AsyncFunctionDef) -> bool:
    return any(
        isinstance(node, ast.While)
        and (isinstance(node.test, ast.Constant) or ast.unparse(node.test) == "not self._stopping")
        for node in ast.walk(function)
    )


def _started(class_: ast.ClassDef):
    """The calls `create_task(self.name(...))` and `ensure_future(...)`, with the name."""
    for call in ast.walk(class_):
        if isinstance(call, ast.Call) and call.args and isinstance(call.args[0], ast.Call):
            starter, started = ast.unparse(call.func), call.args[0].func
            if starter.endswith(("create_task", "ensure_future")) and isinstance(
                started, ast.Attribute
            ):
                yield call, started.attr
