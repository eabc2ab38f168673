"""The command-line flags of metrics-governor: `-queue-max-size 10000` is `exporter.queue.max_size`.

Its program takes flags with one dash or two, with the value behind `=` or as the next word; a flag
that is true or false may stand alone. Every key of `exporter.queue` has such a flag.
"""

import difflib

from penstock.config.load import leaves
from penstock.config.schema import SendQueueSettings
from penstock.errors import ConfigError

SECTION = "exporter.queue"
# Two flags are not named as their keys are.
_OTHER_NAMES = {"queue-meta-sync": "meta_sync_interval", "memory-limit-ratio": "memory_limit_ratio"}
_KINDS = {name: kind for name, kind, _ in leaves(SendQueueSettings)}
FLAGS = {f"queue-{name.replace('.', '-').replace('_', '-')}": name for name in _KINDS}
FLAGS |= _OTHER_NAMES


def translate_flags(words: list[str]) -> list[str]:
    """Return the command line with these flags as `--set KEY=VALUE`. Raises ConfigError for a flag
    that looks like one of them but is unknown, and for one without a value.
    """
    translated: list[str] = []
    waiting = iter(enumerate(words))
    for at, word in waiting:
        flag, equals, value = word.lstrip("-").partition("=")
        if not word.startswith("-") or not flag.startswith(("queue-", "memory-limit-")):
            translated.append(word)
            continue
        if flag not in FLAGS:
            close = difflib.get_close_matches(flag, FLAGS, n=1)
            hint = f"; did you mean -{close[0]}?" if close else ""
            raise ConfigError(f"{word}: unknown flag{hint}")
        key = FLAGS[flag]
        if not equals:
            following = words[at + 1] if at + 1 < len(words) else "-"
            if not following.startswith("-"):
                _, value = next(waiting)
            elif _KINDS[key] is bool:
                value = "true"
            else:
                raise ConfigError(f"{word} needs a value, such as {word} VALUE")
        translated += ["--set", f"{SECTION}.{key}={value}"]
    return translated
