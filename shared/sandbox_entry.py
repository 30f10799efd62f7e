"""First process of a sandbox that has a model API: forwards 127.0.0.1:PORT to the proxy's unix socket.

Owns: the harness process as its child, and every byte between harness and proxy. Runs as process 1 of the sandbox with
the system's own `python3 -I -S`, so it uses the C modules directly: importing `socket` or `selectors` would double the
start-up time, which is paid once per execution. It imports nothing of Gyre.

    python3 -I -S sandbox_entry.py SOCKET PORT COMMAND [ARGUMENT...]

SOCKET "-" forwards nothing. On its standard input, a stream socket, it reports one JSON line {"started": pid} or
{"error": text}, later {"exit": code, "signal": number}; each byte it receives there is a signal number for the
harness's process group. End of file there means that the service is gone: everything ends.

Invariant: bytes are forwarded unchanged and in order, an end of stream in one direction leaves the other one open, and
no buffer holds more than one read: a slow reader slows its writer down.
"""

import _signal
import _socket
import os
import select
import sys

CHUNK = 65536
READ, WRITE = select.EPOLLIN, select.EPOLLOUT


class Side:
    """One end of a forwarded connection; `pending` are bytes from the other end not yet written here."""

    __slots__ = ("ended", "finished", "mask", "other", "pending", "sock")

    def __init__(self, sock):
        sock.setblocking(False)
        self.sock = sock
        self.other = None
        self.pending = b""
        self.ended = False  # this end will send nothing more
        self.finished = False  # we will send nothing more to this end
        self.mask = 0


class Forwarder:
    """Every forwarded connection, on one epoll object."""

    def __init__(self, poll, listener, path):
        self.poll, self.listener, self.path = poll, listener, path
        self.sides = {}
        listener.setblocking(False)
        poll.register(listener.fileno(), READ)

    def accept(self):
        try:
            fd, _ = self.listener._accept()
        except OSError:
            return  # the client is gone again, or there are no descriptors left: it stays in the backlog
        client = Side(_socket.socket(fileno=fd))
        upstream = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
        try:
            upstream.connect(self.path)
        except OSError as error:
            complain(f"the model API's socket: {error}")
            upstream.close()
            client.sock.close()
            return
        server = Side(upstream)
        client.other, server.other = server, client
        for side in (client, server):
            self.sides[side.sock.fileno()] = side
            side.mask = READ
            self.poll.register(side.sock.fileno(), READ)

    def handle(self, fd, events):
        side = self.sides.get(fd)
        if side is None:
            return  # closed by an earlier event of the same poll
        try:
            if side.mask & WRITE:
                self.write(side)
            if side.mask & READ and events & ~WRITE:
                self.read(side)
        except BlockingIOError:
            pass
        except OSError:
            return self.close(side)  # reset: neither direction is of use any more
        if side.ended and side.other.ended and not side.pending and not side.other.pending:
            return self.close(side)
        self.watch(side)
        self.watch(side.other)

    def read(self, side):
        data = side.sock.recv(CHUNK)
        if data:
            side.other.pending = data
        else:
            side.ended = True
        self.write(side.other)

    def write(self, side):
        if side.pending:
            try:
                side.pending = side.pending[side.sock.send(side.pending) :]
            except BlockingIOError:
                return
        if not side.pending and side.other.ended and not side.finished:
            side.finished = True
            side.sock.shutdown(_socket.SHUT_WR)

    def watch(self, side):
        """Ask for what the side is ready for. With nothing to do it leaves epoll, lest a hang-up wake it for ever."""
        mask = (0 if side.ended or side.other.pending else READ) | (WRITE if side.pending else 0)
        if mask == side.mask:
            return
        if mask == 0:
            self.poll.unregister(side.sock.fileno())
        elif side.mask == 0:
            self.poll.register(side.sock.fileno(), mask)
        else:
            self.poll.modify(side.sock.fileno(), mask)
        side.mask = mask

    def close(self, side):
        for end in (side, side.other):
            del self.sides[end.sock.fileno()]
            end.sock.close()


def complain(text):
    os.write(2, f"sandbox: {text}\n".encode("utf-8", "replace"))


def listen(port):
    listener = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
    listener.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(128)
    return listener


def spawn(command):
    """Start the harness in a process group of its own, without the signals that Python ignores."""
    ignored = (_signal.SIGPIPE, _signal.SIGXFSZ)
    return os.posix_spawnp(command[0], command, os.environ, setpgroup=0, setsigdef=ignored)


def reap(harness):
    """Collect everything that ended (process 1 inherits orphans); returns the harness's wait status, or None."""
    status = None
    while True:
        try:
            pid, raw = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if pid == 0:
            return status
        if pid == harness:
            status = raw


def forward_signals(control, harness):
    """False when the service is gone."""
    try:
        data = control.recv(16)
    except BlockingIOError:
        return True
    for number in data:
        try:  # without contextlib, whose import takes longer than all of this
            os.killpg(harness, number)
        except (ProcessLookupError, PermissionError):
            continue  # it has just ended: its exit is reported
    return bool(data)


def run(socket_path, port, control, command):
    poll = select.epoll()
    forwarder = Forwarder(poll, listen(port), socket_path) if socket_path != "-" else None
    wake, woken = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(woken, False)
    _signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    _signal.signal(_signal.SIGCHLD, lambda *_: None)
    harness = spawn(command)
    control.sendall(b'{"started": %d}\n' % harness)
    control.setblocking(False)
    poll.register(wake, READ)
    poll.register(control.fileno(), READ)
    while True:
        for fd, events in poll.poll():
            if fd == control.fileno():
                if not forward_signals(control, harness):
                    return 1
            elif fd == wake:
                os.read(wake, 4096)
                status = reap(harness)
                if status is not None:
                    return finish(control, status)
            elif forwarder is not None and fd == forwarder.listener.fileno():
                forwarder.accept()
            elif forwarder is not None:
                forwarder.handle(fd, events)


def finish(control, status):
    code = os.waitstatus_to_exitcode(status)
    control.setblocking(True)
    control.sendall(b'{"exit": %d, "signal": %d}\n' % (max(code, 0), max(-code, 0)))
    return code if code >= 0 else 128 - code


def main(argv):
    socket_path, port, command = argv[0], int(argv[1]), argv[2:]
    control = _socket.socket(fileno=os.dup(0))
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    try:
        return run(socket_path, port, control, command)
    except OSError as error:
        text = str(error).replace("\\", "/").replace('"', "'")
        control.setblocking(True)
        control.sendall(f'{{"error": "{text}"}}\n'.encode("utf-8", "replace"))
        return 126


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))
