"""What the shop stores, and what it sends."""

import os

import pydantic
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

ORDERS, EVENTS, REPORTS = "shop.orders", "shop.events", "shop.reports"


class Table(DeclarativeBase):
    pass


class Order(Table):
    __tablename__ = "shop_order"

    id: Mapped[int] = mapped_column(primary_key=True)
    customer: Mapped[str]
    total: Mapped[int]  # in cents
    state: Mapped[str] = mapped_column(default="new")  # new, paid


class OrderPlaced(pydantic.BaseModel):
    """The message: what the worker needs to know of an order."""

    id: int
    customer: str
    total: int


def new_engine() -> AsyncEngine:
    url = os.environ["SHOP_DATABASE"].replace("postgresql://", "postgresql+asyncpg://", 1)
    return create_async_engine(url)
