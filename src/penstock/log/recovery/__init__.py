"""Opening a topic: finish or undo what was interrupted, believe the checkpoint, scan the rest.

The data files are the truth. Everything else is checked against them cheaply and rebuilt when it
disagrees:

- A sealed segment was synced before it got its name; its last index row must point at the record
  that ends the file. If not, the segment is scanned and its index rebuilt. It ends before the
  next segment begins: what a segment that broke may hold beyond that was never answered.
- The active segment is believed up to its checkpoint and scanned from there. A record that is not
  whole at the end is a torn write, and so is a batch whose sidecar row promises more than there is:
  both are cut off, into a quarantine file. A record that makes no sense before others that do is a
  hole: kept, reported, and refused to readers.
- A sidecar row that is damaged tells nothing; one that speaks of data that is not there is dropped.

Each finding is logged, counted, and noted in `damage.json` when something was lost. Nothing here
keeps a topic from opening; a disk that does not even let itself be read makes it fail for this
topic alone.
"""

from penstock.log.recovery.interrupted import finish_swap
from penstock.log.recovery.topic import RecoveredTopic, create_files, recover

__all__ = ["RecoveredTopic", "create_files", "finish_swap", "recover"]
