"""Servers that speak TLS, and certificates for these servers.

A machine's own PostgreSQL usually includes OpenSSL, but the embedded servers do not. Without a
server with OpenSSL, a process of the tests ends TLS in front of an embedded server; clients notice
no difference.
"""

import asyncio
import contextlib
import datetime
import ipaddress
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from streamer.commands.demo.embedded_servers import Server
from tests.support.postgres import running, versions

_REQUEST_BYTES = 8
"""The size of SSLRequest: length and code."""


@dataclass(frozen=True)
class Certificate:
    """The files of a certificate and its key."""

    path: Path
    key_path: Path


class Authority:
    """A certification authority of a test's own."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.datetime.now(datetime.UTC)
        usage = x509.KeyUsage(
            digital_signature=True,
            key_cert_sign=True,
            crl_sign=True,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            encipher_only=False,
            decipher_only=False,
        )
        certificate = (
            x509.CertificateBuilder()
            .subject_name(self._name)
            .issuer_name(self._name)
            .public_key(self._key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=30))
            .not_valid_after(now + datetime.timedelta(days=30))
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(usage, critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.path = directory / f"{name}.crt"
        self.path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str, *, days: int = 10, address: str = "127.0.0.1") -> Certificate:
        """Return a certificate for *name* that ends in *days*; negative days: expired."""
        key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.datetime.now(datetime.UTC)
        names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
        certificate = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=20))
            .not_valid_after(now + datetime.timedelta(days=days))
            .add_extension(names, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        issued = Certificate(
            self._directory / f"{name}{days}{address}.crt",
            self._directory / f"{name}{days}{address}.key",
        )
        issued.path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        issued.key_path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        issued.key_path.chmod(0o600)
        return issued


class TlsServer:
    """A server that asks clients of the role `certified` for a certificate of *clients*."""

    def __init__(self, server: Server, clients: Authority) -> None:
        self.server = server
        self.clients = clients
        self.port = server.port

    def present(self, certificate: Certificate) -> None:
        """Let new connections see *certificate*."""
        for source, name in (
            (certificate.path, "server.crt"),
            (certificate.key_path, "server.key"),
        ):
            place = self.server.data / name
            place.unlink(missing_ok=True)
            self.server._write_for_server(place, source.read_text())
        self.server.reload()


class _Front(TlsServer):
    """Ends TLS in front of a server without TLS."""

    def __init__(self, server: Server, clients: Authority) -> None:
        super().__init__(server, clients)
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        listening = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._serve, "127.0.0.1", 0), self._loop
        ).result()
        self._listening = listening
        self.port = listening.sockets[0].getsockname()[1]

    def present(self, certificate: Certificate) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate.path, certificate.key_path)
        context.load_verify_locations(self.clients.path)
        context.verify_mode = ssl.CERT_OPTIONAL
        self._context = context

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await reader.readexactly(_REQUEST_BYTES)
            writer.write(b"S")
            await writer.start_tls(self._context)
            head = await reader.readexactly(4)
            startup = head + await reader.readexactly(int.from_bytes(head) - 4)
            certificate = writer.get_extra_info("peercert")
            if b"certified" in startup and not certificate:
                writer.close()
                return
            theirs, ours = await asyncio.open_connection("127.0.0.1", self.server.port)
            ours.write(startup)
            await asyncio.gather(_pump(reader, ours), _pump(theirs, writer))

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._listening.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()


def _speaks_tls(binaries: Path) -> bool:
    return b"SSL_CTX_new" in (binaries / "postgres").read_bytes()


@contextlib.contextmanager
def tls_server(directory: Path, clients: Authority, first: Certificate) -> Iterator[TlsServer]:
    """Run a server that presents *first* to clients."""
    able = [binaries for binaries in versions().values() if _speaks_tls(binaries)]
    with running(directory, able[0] if able else versions()["18"]) as server:
        if not able:
            front = _Front(server, clients)
            front.present(first)
            yield front
            front.close()
            return
        speaking = TlsServer(server, clients)
        server._write_for_server(server.data / "clients.crt", clients.path.read_text())
        speaking.present(first)
        server.configure(ssl="on", ssl_ca_file="clients.crt")
        hba = server.data / "pg_hba.conf"
        trusted = hba.read_text()
        hba.write_text(
            "hostssl all certified 127.0.0.1/32 cert\n"
            "hostnossl all certified 127.0.0.1/32 reject\n" + trusted
        )
        server.reload()
        yield speaking
