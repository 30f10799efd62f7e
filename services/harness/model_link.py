"""The folder through which sandboxes reach the model proxy.

Owns a folder that holds nothing but a hard link to the proxy's unix socket. Sandboxes mount the folder, not the socket:
a proxy that restarts makes a new socket, and `renew` brings it to executions that are already running.
"""

from __future__ import annotations

import os
import shutil
import uuid
from pathlib import Path

from shared.sandbox import MODEL_SOCKET


class ModelLink:
    """Made by `renew`, removed by `close`."""

    def __init__(self) -> None:
        self.folder: Path | None = None

    def renew(self, proxy_socket: Path) -> Path:
        """Point to `proxy_socket`; returns the folder to mount. Raises OSError if the socket is not there.

        A proxy that was started again has a new socket under the old name: what counts is the file, not its path."""
        if self.folder is None:
            # Beside the socket, because hard links do not cross file systems.
            self.folder = proxy_socket.parent / f"harness-{uuid.uuid4().hex[:12]}"
            self.folder.mkdir(mode=0o755)
            self.folder.chmod(0o755)
        link = self.folder / MODEL_SOCKET
        if link.exists() and link.samefile(proxy_socket):
            return self.folder
        new = self.folder / "new"
        new.unlink(missing_ok=True)
        os.link(proxy_socket, new)
        if os.geteuid() == 0:  # the sandboxes' own users must be allowed to connect; keys protect the API
            new.chmod(0o666)
        os.replace(new, link)
        new.unlink(missing_ok=True)  # replacing a link to the same socket leaves both names
        return self.folder

    def close(self) -> None:
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder = None
