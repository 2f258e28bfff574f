"""Ways to reach the server: HTTP/1.0, both families, Unix sockets, TLS."""

import json
import select
import signal
import socket
import ssl

import httpx
import pytest
from test_process import Server, server

from data_files import TLS


def raw(served: Server, request: str, body: dict) -> tuple[bytes, bytes]:
    """Send a request over a socket of its own; return head and body of all that comes until it is closed."""
    host, port = served.url.removeprefix("http://").split(":")
    content = json.dumps(body).encode()
    head = f"{request}\r\nHost: s\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=30) as client:
        client.sendall(head.encode() + content)
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    return answer.split(b"\r\n\r\n", 1)[0].lower(), answer.split(b"\r\n\r\n", 1)[1]


def test_http_1_0_gets_no_chunks():
    with server() as served:
        served.load()
        served.tell("allow 100")
        for path, body in (
            ("/v1/completions", {"prompt": "hi"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ):
            head, content = raw(served, f"POST {path} HTTP/1.0", body | {"stream": True})
            assert b"transfer-encoding" not in head
            assert b"connection: close" in head
            lines = [line for line in content.split(b"\n") if line]
            assert all(line.startswith(b"data: ") for line in lines)
            assert lines[-1] == b"data: [DONE]"
            assert (
                "".join(
                    choice.get("text") or choice.get("delta", {}).get("content") or ""
                    for line in lines[:-1]
                    for choice in json.loads(line.removeprefix(b"data: "))["choices"]
                )
                == "abc"
            )
            head, content = raw(served, f"POST {path} HTTP/1.0", body)
            assert b"content-length" in head
            assert json.loads(content)["choices"]
        # Others still get theirs.
        request = {"prompt": "hi", "stream": True}
        with served.client.stream("POST", "/v1/completions", json=request) as response:
            assert response.headers["transfer-encoding"] == "chunked"
            assert response.read().endswith(b"data: [DONE]\n\n")


def test_head_is_get_without_the_body():
    with server() as served:
        served.load()
        for path in ("/health", "/metrics", "/v1/models", "/"):
            head, body = raw(served, f"HEAD {path} HTTP/1.0", {})
            assert head.startswith(b"http/1.1 200"), head
            assert body == b""
        head, _ = raw(served, "HEAD /v1/completions HTTP/1.0", {})
        assert head.startswith(b"http/1.1 405"), head


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs IPv6")
def test_every_network_is_both_families():
    with server("--host", "::") as served:
        port = served.url.rpartition(":")[2]
        for host in ("[::1]", "127.0.0.1"):
            assert httpx.get(f"http://{host}:{port}/health").status_code == 503


def test_a_unix_socket(tmp_path):
    path = str(tmp_path / "socket")
    for _ in range(2):  # the second takes the place of what the first left over
        with server("--uds", path) as served:
            assert served.url == f"unix:{path}"
            with httpx.Client(transport=httpx.HTTPTransport(uds=path), base_url="http://s") as client:
                served.load()
                served.tell("allow 100")
                response = client.post("/v1/completions", json={"prompt": "hi"}, timeout=30)
                assert response.json()["choices"][0]["text"] == "abc"
            served.process.send_signal(signal.SIGTERM)
            assert served.finish() == 0


def test_tls():
    certificate, key = str(TLS / "cert.pem"), str(TLS / "key.pem")
    with server("--ssl-certfile", certificate, "--ssl-keyfile", key) as served:
        assert served.url.startswith("https://127.0.0.1:")
        trusting = ssl.create_default_context(cafile=certificate)
        assert httpx.get(f"{served.url}/health", verify=trusting).status_code == 503
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{served.url}/health")


def test_tls_with_certificates_of_clients():
    certificate, key = str(TLS / "cert.pem"), str(TLS / "key.pem")
    flags = ("--ssl-certfile", certificate, "--ssl-keyfile", key, "--ssl-ca-certs", certificate)
    with server(*flags) as served:
        context = ssl.create_default_context(cafile=certificate)
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{served.url}/health", verify=context)
        context.load_cert_chain(certificate, key)
        assert httpx.get(f"{served.url}/health", verify=context).status_code == 503


def until_closed(served: Server, start: bytes, more: bytes, most: int) -> bytes:
    """Send `start` and then `more` until the server closes the connection, at most `most` times."""
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as client:
        answer, sent = b"", 0
        client.sendall(start)
        try:
            while sent < most and not select.select([client], [], [], 0)[0]:
                client.sendall(more)
                sent += 1
            answer = b"".join(iter(lambda: client.recv(65536), b""))
        except (BrokenPipeError, ConnectionResetError):
            pass  # closed with something unread
        assert sent < most, "the server took all of it"
        return answer


def test_a_head_that_does_not_end_is_not_kept():
    """Nor are trailers; a body may be as long as it likes, and so may several heads together."""
    with server() as served:
        served.load()
        served.tell("allow 100")
        chunked = b"POST /v1/completions HTTP/1.1\r\nHost: s\r\nTransfer-Encoding: chunked\r\n"
        chunked += b"Content-Type: application/json\r\n\r\n"
        for start, more in (
            (b"GET /health HTTP/1.1\r\nHost: s\r\nX-Long: ", b"a" * 4096),
            (b"GET /health HTTP/1.1\r\nHost: s\r\n", b"X-Another: a\r\n" * 256),
            (b"GET /", b"a" * 4096),
            (chunked + b"0\r\nX-Long: ", b"a" * 4096),
        ):
            answer = until_closed(served, start, more, 4096)
            assert answer == b"" or answer.startswith(b"HTTP/1.1 431 "), answer[:100]
        assert served.client.get("/health", headers={"x-long": "a" * 60_000}).status_code == 200
        body = {"prompt": "hi", "user": "u" * 1_000_000}
        assert served.client.post("/v1/completions", json=body).status_code == 200
        head = b"GET /health HTTP/1.1\r\nHost: s\r\nX-Long: " + b"a" * 1000 + b"\r\n"
        host, port = served.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=30) as client:
            client.sendall((head + b"\r\n") * 150 + head + b"Connection: close\r\n\r\n")
            assert b"".join(iter(lambda: client.recv(65536), b"")).count(b"HTTP/1.1 200 OK") == 151


def test_a_websocket_does_not_break_into_an_answer():
    """Two requests at once, of which the second is a handshake: the connection is closed."""
    upgrade = b"GET /v1/stream HTTP/1.1\r\nHost: s\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    upgrade += b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    body = json.dumps({"prompt": "hi", "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: s\r\nContent-Type: application/json\r\n"
    head += b"Content-Length: %d\r\n\r\n" % len(body)
    with server("--shutdown-timeout", "0") as served:
        served.load()
        host, port = served.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as client:
            client.sendall(head + body + upgrade)
            assert client.recv(65536) == b""
        served.tell("allow 100")
        served.wait_for("status=499")
        with socket.create_connection((host, int(port)), timeout=10) as client:
            client.sendall(b"GET /health HTTP/1.1\r\nHost: s\r\n\r\n")
            answer = b""
            while not answer.endswith(b'"}'):
                answer += client.recv(65536)
            assert answer.startswith(b"HTTP/1.1 200 ")
            client.sendall(upgrade)
            assert client.recv(65536).startswith(b"HTTP/1.1 101 ")
