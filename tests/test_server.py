"""The server of the tests answers as it is configured to."""

import http.client

from tests.server import Answer, serving


def test_answers_ranges_and_faults():
    with serving() as server:
        file = server.add("/a b.bin", bytes(range(10)), etag='"1"')
        file.answers = [Answer(503, {"Retry-After": "1"}, b"busy"), Answer(cut_after=3)]
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port)

        def get(**headers: str) -> tuple[int, bytes]:
            connection.request(
                "GET", "/a%20b.bin", headers={name.replace("_", "-"): text for name, text in headers.items()}
            )
            answer = connection.getresponse()
            try:
                return answer.status, answer.read()
            except http.client.IncompleteRead as error:
                connection.close()  # The server has ended it.
                return answer.status, error.partial

        assert get() == (503, b"busy")
        assert get() == (200, bytes(range(3)))
        assert get(Range="bytes=4-", If_Range='"1"') == (206, bytes(range(4, 10)))
        assert get(Range="bytes=4-", If_Range='"2"') == (200, bytes(range(10)))
        assert get(Range="bytes=10-") == (416, b"")
        assert server.asked("/a b.bin") == ["", "", "bytes=4-", "bytes=4-", "bytes=10-"]
        assert server.sent("/a b.bin") == 4 + 3 + 6 + 10
        connection.close()
