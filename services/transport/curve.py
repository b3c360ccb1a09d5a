"""Keys of a grid link: ZeroMQ's CURVE, by which both ends prove themselves and every frame travels encrypted.

Notable:
- Both key pairs are derived from the run's grid key, a file that every process of the run can read and nobody else: no
  key is exchanged, and none is ever sent. Ranks share one pair, for whoever reads the file could be any of them.
- A receiver speaks to the sender whose public key it derived, and to nobody else; a sender lets in the one public key
  of the receivers, and without somebody who answers for that (ZAP) nobody at all.
- Not the bearer token in a Hello: that would prove one end only, and could be read off the wire. Not a keyed digest of
  our own over Hello and items: libzmq refuses a stranger before a byte of his reaches our code, has a nonce for each
  connection and message and new keys for each connection, and it is not ours to get wrong.
"""

from __future__ import annotations

import hmac
from collections import Counter

import zmq
import zmq.asyncio
from zmq.utils import z85

from services.runtime.auth import Token
from services.wire.errors import ConfigError

DOMAIN = b"counterpoint-grid"
_ZAP = "inproc://zeromq.zap.01"
_ZAP_VERSION = b"1.0"


class LinkKeys:
    """The key pairs of one run's senders and receivers.

    Args:
        grid_key: What they are derived from.

    Raises:
        ConfigError: This build of ZeroMQ has no CURVE.
    """

    def __init__(self, grid_key: Token) -> None:
        if not zmq.has("curve"):
            raise ConfigError(["grid links: this pyzmq has no CURVE; fix: install a pyzmq with libsodium"])
        self._sender = z85.encode(grid_key.derive("counterpoint grid sender"))
        self._receiver = z85.encode(grid_key.derive("counterpoint grid receiver"))

    def secure_sender(self, socket: zmq.Socket) -> None:
        """Have a socket that will bind speak CURVE, and ask the `Gate` of its context about every key."""
        socket.set(zmq.CURVE_SERVER, 1)
        socket.set(zmq.CURVE_SECRETKEY, self._sender)
        socket.set(zmq.ZAP_DOMAIN, DOMAIN)
        socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)  # nobody comes in while there is no gate

    def secure_receiver(self, socket: zmq.Socket) -> None:
        """Have a socket that will connect speak CURVE, to our sender alone."""
        socket.set(zmq.CURVE_SERVERKEY, zmq.curve_public(self._sender))
        socket.set(zmq.CURVE_SECRETKEY, self._receiver)
        socket.set(zmq.CURVE_PUBLICKEY, zmq.curve_public(self._receiver))

    def admits(self, public_key: bytes) -> bool:
        """Whether a public key (32 bytes) is the receivers'."""
        return hmac.compare_digest(z85.encode(public_key), zmq.curve_public(self._receiver))


class Gate:
    """Answers libzmq's question who may come in (ZeroMQ's authentication protocol, RFC 27); one per context.

    Args:
        context: Whose sockets ask; make the gate before they bind.
        keys: Which key is let in.
        counters: Strangers are counted here, under "denied".
    """

    def __init__(self, context: zmq.asyncio.Context, keys: LinkKeys, counters: Counter[str]) -> None:
        self._keys = keys
        self._counters = counters
        self._socket = context.socket(zmq.REP)
        self._socket.set(zmq.LINGER, 0)
        self._socket.bind(_ZAP)

    async def serve(self) -> None:
        """Answer until cancelled."""
        while True:
            _, request_id, domain, _, _, mechanism, *credentials = await self._socket.recv_multipart()
            known = domain == DOMAIN and mechanism == b"CURVE" and len(credentials) == 1
            status, text = (b"200", b"OK") if known and self._keys.admits(credentials[0]) else (b"400", b"unknown key")
            if status != b"200":
                self._counters["denied"] += 1
            await self._socket.send_multipart([_ZAP_VERSION, request_id, status, text, b"", b""])

    def close(self) -> None:
        """Stop answering."""
        self._socket.close(linger=0)
