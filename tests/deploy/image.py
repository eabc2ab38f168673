"""Builds deploy/docker/Dockerfile without a container engine, as far as that goes.

Each stage is this machine's file system with a layer of its own on top (overlayfs in a mount
namespace), in place of the base image; the machine's own files stay as they are. COPY, WORKDIR, ENV,
USER and RUN do in it what they say. That shows whether the steps work and what is in the result, not
whether the base image has all they need.
"""

import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[2]


def instructions(text: str) -> list[tuple[str, str]]:
    """(word, rest) of each instruction, with continued lines joined."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [
        (word.upper(), rest.strip())
        for word, _, rest in (line.partition(" ") for line in joined.splitlines() if line)
    ]


def allowed(path: str, rules: list[str]) -> bool:
    """Whether .dockerignore lets a file into the build."""
    result = True
    for rule in rules:
        pattern = rule.lstrip("!").removeprefix("**/")
        parts = path.split("/")
        below = ["/".join(parts[:end]) for end in range(1, len(parts) + 1)]
        if any(fnmatch(part, pattern) for part in (parts if "**/" in rule else below)):
            result = rule.startswith("!")
    return result


@dataclass
class Stage:
    directory: Path
    env: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    user: int | None = None
    settings: dict[str, str] = field(default_factory=dict)  # ENTRYPOINT, CMD, HEALTHCHECK and so on

    def __post_init__(self) -> None:
        for name in ("upper", "work", "root"):
            (self.directory / name).mkdir(parents=True)

    def command(self, *argv: str, isolate: bool = False) -> list[str]:
        """A command line that runs `argv` in this stage; isolated: as process 1 of a process
        namespace of its own.
        """
        root = self.directory / "root"
        layers = f"lowerdir=/,upperdir={self.directory}/upper,workdir={self.directory}/work"
        proc = f"mount -t proc proc {root}/proc" if isolate else f"mount --rbind /proc {root}/proc"
        script = (
            f"mount -t overlay overlay -o {layers} {root} && {proc}"
            f" && mount --rbind /dev {root}/dev && exec "
        )
        enter = [
            "chroot",
            *([f"--userspec={self.user}:{self.user}"] if self.user else []),
            str(root),
        ]
        enter += ["env", *(f"{name}={value}" for name, value in self.env.items())]
        enter += ["sh", "-c", f'cd {self.workdir} && exec "$@"', "sh", *argv]
        flags = ["--mount", *(["--pid", "--fork", "--kill-child"] if isolate else [])]
        return ["unshare", *flags, "sh", "-c", script + shlex.join(enter)]

    def run(self, *argv: str) -> None:
        done = subprocess.run(
            self.command(*argv), capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == 0, f"{argv}: {done.stdout}\n{done.stderr}"


def build(directory: Path) -> Stage:
    """The last stage."""
    rules = [
        line
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    stages: dict[str, Stage] = {}
    stage: Stage | None = None
    for word, rest in instructions((ROOT / "deploy/docker/Dockerfile").read_text()):
        if word == "ARG":
            continue
        if word == "FROM":
            name = rest.rpartition(" AS ")[2] if " AS " in rest else "last"
            stage = stages[name] = Stage(directory / name)
            # The base image's Python is this machine's, for whichever user.
            python = Path(sys.base_prefix) / "bin"
            stage.env["PATH"] = (
                f"{python}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
            )
            stage.env["HOME"] = "/tmp"
            stage.run("chmod", "o+x", *(str(path) for path in python.parents))
            stage.run(
                "sh", "-c", "userdel penstock; groupdel penstock; true"
            )  # made by tests that run as root
            continue
        assert stage is not None
        if word == "ENV":
            for pair in shlex.split(rest):
                name, _, value = pair.partition("=")
                stage.env[name] = re.sub(
                    r"\$(\w+)", lambda match, env=stage.env: env.get(match[1], ""), value
                )
        elif word == "WORKDIR":
            stage.run("mkdir", "-p", rest)
            stage.workdir = rest
        elif word == "USER":
            stage.user = int(rest.partition(":")[0])
        elif word == "RUN":
            stage.run("sh", "-c", rest)
        elif word == "COPY":
            _copy(rest, stage, stages, rules)
        else:
            stage.settings[word] = rest
    assert stage is not None
    return stage


def _copy(rest: str, stage: Stage, stages: dict[str, Stage], rules: list[str]) -> None:
    """Into the stage's own layer: nobody has it mounted between two commands."""
    words = rest.split()
    origin = next((word.partition("=")[2] for word in words if word.startswith("--from=")), None)
    *sources, target = [word for word in words if not word.startswith("--")]
    into = stage.directory / "upper" / str(Path(stage.workdir, target)).lstrip("/")
    for source in sources:
        if origin:
            shutil.copytree(
                stages[origin].directory / "upper" / source.lstrip("/"), into, symlinks=True
            )
            continue
        path = ROOT / source
        for file in (
            [path]
            if path.is_file()
            else sorted(paths for paths in path.rglob("*") if paths.is_file())
        ):
            name = file.relative_to(ROOT).as_posix()
            if allowed(name, rules):
                directory = target.endswith(("/", ".")) or len(sources) > 1
                place = into / file.name if path.is_file() and directory else into
                place = place if path.is_file() else into / file.relative_to(path)
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(file, place)
            else:
                assert path.is_dir(), f".dockerignore keeps {name} out of the build"
