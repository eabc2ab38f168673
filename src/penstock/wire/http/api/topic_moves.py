"""Moves of local topics to shared placement."""

from penstock.contract import operations
from penstock.contract.pipelines import TopicMove
from penstock.topics.moves import TopicMoves
from penstock.wire.http.routes import serves


class TopicMovesApi:
    tag = "topics"

    def __init__(self, moves: TopicMoves) -> None:
        self._moves = moves

    @serves(operations.MOVE_TOPIC)
    async def move(self, topic: str) -> TopicMove:
        return await self._moves.begin(topic)

    @serves(operations.GET_TOPIC_MOVE)
    def status(self, topic: str) -> TopicMove:
        return self._moves.status(topic)
