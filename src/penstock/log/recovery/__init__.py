"""Open a topic: finish or undo interrupted work, trust the checkpoint, scan the rest.

The data files are the truth. All other files are checked against them cheaply, and rebuilt if they
disagree:

- A sealed segment was synced before it got its name. Its last index row must point at the last
  record of the file. If not, the segment is scanned and its index rebuilt. It ends before the next
  segment begins: later records in a broken segment were never acknowledged.
- The active segment is trusted up to its checkpoint and scanned from there. An incomplete record at
  the end is a torn write, and so is a batch whose sidecar row covers more data than there is. Both
  are moved to a quarantine file. An invalid record before valid ones is a hole: kept, reported, and
  refused to readers.
- A damaged sidecar row is ignored. A row that describes data that does not exist is dropped.

Each finding is logged and counted, and losses are added to `damage.json`. No damage prevents a
topic from opening. If the disk cannot be read, only this topic fails.
"""

from penstock.log.recovery.interrupted import finish_swap
from penstock.log.recovery.topic import RecoveredTopic, create_files, recover

__all__ = ["RecoveredTopic", "create_files", "finish_swap", "recover"]
