"""A store whose clients reach it through a relay that counts the bytes of their requests: of torch, gloo and Undertow alike."""

import contextlib
import selectors
import socket
import threading
from datetime import timedelta
from typing import cast

import torch.distributed as dist


class CountedStore:
    """Serves a store; `client` connects to it."""

    def __init__(self) -> None:
        self.num_bytes = 0  # of requests
        self._server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self._others = dict[socket.socket, socket.socket]()  # of each connection, the other half
        self._clients = set[socket.socket]()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        threading.Thread(target=self._relay, daemon=True).start()

    def client(self) -> dist.Store:
        port: int = self._listener.getsockname()[1]
        return dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60))

    def _relay(self) -> None:
        while True:
            for key, _ in self._selector.select():
                link = cast(socket.socket, key.fileobj)
                if link is self._listener:
                    self._connect(link.accept()[0])
                elif link in self._others:
                    self._pass_on(link)

    def _connect(self, client: socket.socket) -> None:
        server = socket.create_connection(("127.0.0.1", self._server.port))
        self._others |= {client: server, server: client}
        self._clients.add(client)
        for each in (client, server):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(each, selectors.EVENT_READ)

    def _pass_on(self, link: socket.socket) -> None:
        with contextlib.suppress(OSError):
            if data := link.recv(1 << 16):
                self._others[link].sendall(data)
                self.num_bytes += len(data) * (link in self._clients)
                return
        for each in (link, self._others[link]):
            self._selector.unregister(each)
            self._clients.discard(each)
            del self._others[each]
            each.close()
