"""A small S3 server for benchmarks: files in a directory, ranges sent by the kernel.

moto's server, which the tests use, reads the whole object for each range and holds all objects in
memory, so that whoever reads ranges is measured against moto and not against a store. This one has
what a benchmark needs: objects, ranges, uploads in parts, conditional writes, listing. It checks no
signatures, and like most stores it does not sync.

    python -m bench.object_server DIRECTORY     prints its port
"""

import os
import re
import shutil
import sys
import threading
import uuid
from datetime import UTC, datetime
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

COPY_BYTES = 1 << 20
PARTS = ".parts"  # in the directory: uploads that are not complete


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    rbufsize = COPY_BYTES
    root: Path
    replacing = threading.Lock()  # held from looking at a condition to the write

    def log_message(self, *words: object) -> None:
        pass

    def parse_request(self) -> bool:
        parsed = super().parse_request()
        if parsed:
            address = urlsplit(self.path)
            self.target = self.root / unquote(address.path).strip("/")
            self.query = {
                name: values[0]
                for name, values in parse_qs(address.query, keep_blank_values=True).items()
            }
        return parsed

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if "list-type" in self.query:
            self._list()
            return
        try:
            file = self.target.open("rb")
        except (FileNotFoundError, IsADirectoryError):
            self._answer(404)
            return
        with file:
            status = os.fstat(file.fileno())
            asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("range", ""))
            start, stop = 0, status.st_size
            headers = {
                "ETag": _tag(status),
                "Last-Modified": formatdate(status.st_mtime, usegmt=True),
            }
            if asked:
                start, stop = int(asked[1]), min(int(asked[2] or stop) + 1, stop)
                headers["Content-Range"] = f"bytes {start}-{stop - 1}/{status.st_size}"
            self._answer(206 if asked else 200, headers, size=stop - start)
            while self.command == "GET" and start < stop:
                start += os.sendfile(self.connection.fileno(), file.fileno(), start, stop - start)

    def _list(self) -> None:
        entries = []
        for path in sorted(self.target.rglob("*")):
            key = path.relative_to(self.target).as_posix()
            if path.is_file() and key.startswith(self.query.get("prefix", "")):
                status = path.stat()
                modified = datetime.fromtimestamp(status.st_mtime, UTC).isoformat()
                entries.append(
                    f"<Contents><Key>{escape(key)}</Key><Size>{status.st_size}</Size>"
                    f"<LastModified>{modified}</LastModified><ETag>{_tag(status)}</ETag></Contents>"
                )
        self._answer(200, text=f"<ListBucketResult>{''.join(entries)}</ListBucketResult>")

    def do_PUT(self) -> None:
        staged = self.root / PARTS / uuid.uuid4().hex
        if "uploadId" in self.query:
            staged = self.root / PARTS / self.query["uploadId"] / self.query["partNumber"]
        with staged.open("wb", buffering=0) as file:
            remaining = int(self.headers.get("content-length", 0))
            while remaining:
                part = self.rfile.read1(min(COPY_BYTES, remaining))
                file.write(part)
                remaining -= len(part)
            if "uploadId" in self.query:
                self._answer(200, {"ETag": _tag(os.fstat(file.fileno()))})
            else:
                self._replace(staged)

    def _replace(self, staged: Path) -> None:
        with self.replacing:
            present = _tag(self.target.stat()) if self.target.is_file() else None
            expected = self.headers.get("if-match", present)
            if present != expected or (present and self.headers.get("if-none-match")):
                staged.unlink()
                self._answer(412)
                return
            self.target.parent.mkdir(parents=True, exist_ok=True)
            staged.rename(self.target)
            self._answer(200, {"ETag": _tag(self.target.stat())})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        if "uploads" in self.query:
            upload = uuid.uuid4().hex
            (self.root / PARTS / upload).mkdir()
            result = f"<UploadId>{upload}</UploadId>"
            self._answer(
                200,
                text=f"<InitiateMultipartUploadResult>{result}</InitiateMultipartUploadResult>",
            )
            return
        parts = self.root / PARTS / self.query["uploadId"]
        first, *others = sorted(parts.iterdir(), key=lambda part: int(part.name))
        with first.open("ab") as whole:
            for part in others:
                with part.open("rb") as source:
                    shutil.copyfileobj(source, whole, COPY_BYTES)
        self.target.parent.mkdir(parents=True, exist_ok=True)
        first.rename(self.target)
        shutil.rmtree(parts)
        tag = _tag(self.target.stat())
        result = f"<ETag>{tag}</ETag>"
        self._answer(
            200, text=f"<CompleteMultipartUploadResult>{result}</CompleteMultipartUploadResult>"
        )

    def do_DELETE(self) -> None:
        self.target.unlink(missing_ok=True)
        self._answer(204)

    def _answer(
        self, status: int, headers: dict[str, str] | None = None, text: str = "", size: int = -1
    ) -> None:
        body = text.encode()
        self.send_response_only(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if size < 0 else size))
        self.end_headers()
        if body:
            self.wfile.write(body)


def _tag(status: os.stat_result) -> str:
    return f'"{status.st_ino:x}-{status.st_mtime_ns:x}"'


if __name__ == "__main__":
    Handler.root = Path(sys.argv[1])
    (Handler.root / PARTS).mkdir(parents=True)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    print(server.server_port, flush=True)
    server.serve_forever()
