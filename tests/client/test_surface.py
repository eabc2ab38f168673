"""What a user sees of the client: names at the root, signatures, docstrings, types."""

import inspect
import re
import typing

import msgspec
import pytest

import penstock
import penstock.blocking
import penstock.client
import penstock.types
from penstock import (
    Client,
    Message,
    Producer,
    PushBuffer,
    Reader,
    SyncClient,
    SyncMessage,
    SyncTopic,
    Topic,
    Transaction,
    outbox,
)
from penstock.client.client import QueueSettings
from penstock.client.consumer import Consumer, ConsumerOptions
from penstock.outbox import Outbox
from penstock.outbox import sync as sync_outbox
from penstock.outbox.sync import SyncOutbox
from penstock.protocol.queue_options import QueueOptions
from penstock.types import (
    AdminClient,
    Routes,
    Schedules,
    SyncAdminClient,
    SyncProducer,
    SyncPushBuffer,
    SyncReader,
    SyncRoutes,
    SyncSchedules,
    SyncTopicGroup,
    SyncTransaction,
    TakeOptions,
    TopicGroup,
)

PAIRS = [
    (SyncClient, Client),
    (SyncMessage, Message),
    (SyncTopic, Topic),
    (SyncTopicGroup, TopicGroup),
    (SyncSchedules, Schedules),
    (SyncRoutes, Routes),
    (SyncAdminClient, AdminClient),
    (SyncPushBuffer, PushBuffer),
    (SyncProducer, Producer),
    (SyncReader, Reader),
    (SyncOutbox, Outbox),
]


def public(kind: type) -> dict[str, typing.Any]:
    return {
        name: member
        for name, member in inspect.getmembers(kind)
        if not name.startswith("_") and (inspect.isfunction(member) or inspect.ismethod(member))
    }


def exports(*more: typing.Any) -> typing.Iterator[tuple[str, typing.Any]]:
    for home in (penstock.client, penstock.types, *more):
        yield from ((name, getattr(home, name)) for name in home.__all__)


def parameters(function: typing.Any) -> list[inspect.Parameter]:
    return list(inspect.signature(function).parameters.values())


@pytest.mark.parametrize(("plain", "asynchronous"), PAIRS)
def test_a_plain_class_has_every_method_of_its_async_class_with_the_same_parameters(
    plain: type, asynchronous: type
) -> None:
    if plain in (SyncClient, SyncOutbox):  # the others are made by these
        assert parameters(plain) == parameters(asynchronous)
    ours, theirs = public(plain), public(asynchronous)
    assert theirs.keys() - ours.keys() == set()
    assert {
        name: [inspect.signature(ours[name]), inspect.signature(method)]
        for name, method in theirs.items()
        if parameters(ours[name]) != parameters(method)
    } == {}


def test_both_outboxes_export_the_same_names() -> None:
    names = set(outbox.__all__)
    assert {name.replace("SyncOutbox", "Outbox") for name in sync_outbox.__all__} == names
    for name in public(Outbox):
        assert parameters(getattr(sync_outbox, name)) == parameters(getattr(outbox, name))


def test_a_plain_transaction_collects_with_the_async_ones_methods() -> None:
    assert public(Transaction).keys() - public(SyncTransaction).keys() == {"push", "ack"}
    assert typing.get_type_hints(SyncTransaction.__enter__)["return"] is Transaction


def test_nothing_public_takes_any_option_or_answers_with_a_dictionary() -> None:
    loose = []
    for name, exported in exports():
        if not inspect.isclass(exported) or issubclass(exported, Exception | msgspec.Struct):
            continue
        for method, function in public(exported).items():
            text = str(inspect.signature(function))
            if re.search(r"\*\*\w+: Any|-> .*dict\[str, Any\]", text):
                loose.append(f"{name}.{method}{text}")
    # what could not be sent is handed back in the form of the HTTP API
    assert [one for one in loose if not one.split("(")[0].endswith(".close")] == []


def test_every_public_class_and_method_says_what_it_does() -> None:
    silent = []
    for name, exported in exports(penstock.blocking):
        if inspect.isclass(exported) and exported.__module__.startswith("penstock"):
            own = [
                f"{name}.{method}"
                for method, function in vars(exported).items()
                if inspect.isfunction(function)
                and not method.startswith("_")
                and not inspect.getdoc(function)
            ]
            silent += own if inspect.getdoc(exported) else [name, *own]
    assert silent == []


def test_the_root_exports_what_the_client_exports() -> None:
    assert set(penstock.client.__all__) <= set(dir(penstock))
    for name in penstock.client.__all__:
        assert getattr(penstock, name) is getattr(penstock.client, name)
    assert not hasattr(penstock, "Clients")


def test_the_surface_fits_in_the_head() -> None:
    assert len(penstock.client.__all__) <= 25
    assert len(public(Client)) <= 22
    assert len(penstock.blocking.__all__) <= 5


@pytest.mark.parametrize(
    ("name", "home"), [("Pushed", "types"), ("QueueOptions", "types"), ("QueueFull", "errors")]
)
def test_a_former_name_at_the_root_works_and_says_where_it_is_now(name: str, home: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"import {name} from penstock.{home}"):
        assert getattr(penstock, name) is getattr(getattr(penstock, home), name)


def test_former_names_of_methods_and_parameters_work_and_name_the_new_ones() -> None:
    with pytest.warns(DeprecationWarning, match="patience= is now retry_for="):
        client = Client(patience=3)
    with pytest.warns(DeprecationWarning, match=r"client.requeue is now client.admin.requeue"):
        assert client.requeue == client.admin.requeue
    with pytest.warns(DeprecationWarning, match="each= is now batches="):

        @client.consumer("orders", batch=10, each=False)
        async def handle(orders: list[dict[str, int]]) -> None: ...

    with pytest.warns(DeprecationWarning, match="from_= is now start="):
        assert client.topic("t").reader(from_=7).topic == "t"
    with SyncClient() as plain, pytest.warns(DeprecationWarning, match="client.admin.queues"):
        assert plain.queues == plain.admin.queues
    for wrong in (client, plain):
        with pytest.raises(AttributeError, match="no attribute 'qeues'"):
            _ = wrong.qeues


def test_named_options_of_a_consumer_are_those_that_it_takes() -> None:
    named, taken = typing.get_type_hints(ConsumerOptions), typing.get_type_hints(Consumer.__init__)
    of_the_store = {"state", "reset_state"}
    unpacked = TakeOptions.__annotations__.keys()
    keywords = {p.name for p in parameters(Consumer) if p.kind is p.KEYWORD_ONLY}
    assert named.keys() == keywords | unpacked | of_the_store
    assert {name: str(taken[name]) for name in keywords} == {
        name: str(named[name]) for name in keywords
    }


def test_the_settings_of_a_queue_are_its_options() -> None:
    fields = {field.name for field in msgspec.structs.fields(QueueOptions)}
    assert set(QueueSettings.__annotations__) == fields


async def test_an_option_that_does_not_exist_is_refused() -> None:
    wrong: typing.Any = {"bach": 10}
    async with Client("http://127.0.0.1:1", retry_for=0) as client:
        with pytest.raises(TypeError, match="'bach'"):
            await client.pop("q", **wrong)
        with pytest.raises(TypeError, match="'bach'"):
            await anext(client.take("q", **wrong))
        with pytest.raises(TypeError, match="'bach'"):
            client.consumer("q", **wrong)(print)
        with pytest.raises(TypeError, match="'bach'"):
            await client.push("q", 1, **wrong)
        topic = client.topic("t")
        for opened in (client.buffer, topic.producer, topic.reader):
            with pytest.raises(TypeError, match="'bach'"):
                opened(**wrong)
        with pytest.raises(TypeError, match="'transaction_id'"):
            await client.push_many("q", [1], transaction_id="t")  # type: ignore[call-arg]
