"""The way from sandboxes to the proxy survives proxies that are killed and started again."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from services.harness.model_link import ModelLink
from shared.sandbox import MODEL_SOCKET


def listening(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind(str(path))
    server.listen()
    return server


def reaches(link: Path, server: socket.socket) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.connect(str(link))
        server.settimeout(1.0)
        server.accept()[0].close()
    return True


def test_a_new_socket_under_the_old_name_is_linked_again(tmp_path: Path) -> None:
    path, model = tmp_path / "proxy.sock", ModelLink()
    first = listening(path)
    folder = model.renew(path)
    assert model.renew(path) == folder
    assert reaches(folder / MODEL_SOCKET, first)
    first.close()  # as when the proxy is killed: its socket's name stays
    with pytest.raises(ConnectionRefusedError):
        reaches(folder / MODEL_SOCKET, first)
    second = listening(path)
    assert model.renew(path) == folder
    assert reaches(folder / MODEL_SOCKET, second)
    second.close()
    model.close()
    assert not folder.exists()
