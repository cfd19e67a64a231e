"""An OpenAI endpoint: one completion at a time, over a connection that each thread keeps."""
import http.client
import json
import threading
import time
import urllib.parse

RETRIES, TIMEOUT_S = 5, 600


class Unanswered(Exception):
    """The endpoint gave no answer, after retries where they make sense. status: of its last reply; None where there was none."""

    def __init__(self, message, status=None):
        super().__init__(message)
        self.status = status


def whole_characters(text):
    """A surrogate without its other half, which JSON can spell and nobody else reads, becomes U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class Endpoint:
    def __init__(self, url, api_key=None, model=None):
        try:
            parts = urllib.parse.urlsplit(url if "://" in url else "http://" + url)
            good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:  # a port that is none, a bracket without its other
            good = False
        if not good:
            raise Unanswered(f"\"{url}\" is no http or https URL")
        self.kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self.host, self.port = parts.hostname, parts.port
        self.path = parts.path.rstrip("/")
        if not self.path.endswith("/v1"):
            self.path += "/v1"
        self.url, self.api_key, self.model = url, api_key, model
        self.local = threading.local()
        self.ended = lambda: False  # whether the server is known to be gone for good

    def _connection(self):
        if getattr(self.local, "connection", None) is None:
            self.local.connection = self.kind(self.host, self.port, timeout=TIMEOUT_S)
        return self.local.connection

    def _once(self, method, path, body):
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = "Bearer " + self.api_key
        connection = self._connection()
        try:
            connection.request(method, self.path + path, body and json.dumps(body), headers)
            reply = connection.getresponse()
            return reply.status, reply.read()
        except (OSError, http.client.HTTPException):
            connection.close()
            self.local.connection = None
            raise

    def call(self, method, path, body=None):
        """The reply's JSON. 503, 429 and broken connections are tried again, other statuses are not."""
        why, status = "", None
        for attempt in range(RETRIES):
            if attempt:
                time.sleep(min(8, 0.25 * 2 ** attempt))
            try:
                status, raw = self._once(method, path, body)
            except (OSError, http.client.HTTPException) as error:
                why, status = f"{type(error).__name__}: {error}", None
                if self.ended():
                    raise Unanswered(f"{self.url}: the worker has ended ({why})") from None
                continue
            if status == 200:
                try:
                    return json.loads(raw)
                except (ValueError, RecursionError):
                    raise Unanswered(f"{self.url}: the reply is no JSON: {raw[:200].decode(errors='replace')}", status) from None
            why = f"{status}: {raw[:200].decode(errors='replace')}"
            if status not in (429, 500, 502, 503, 504):
                break
        raise Unanswered(f"{self.url}: {why}", status)

    def served_model(self):
        """The model's name: what was given, else the first that the endpoint lists."""
        if not self.model:
            self.model = self._member(self.call("GET", "/models"), "data", 0, "id")
        return self.model

    def _member(self, reply, *path):
        """The string at this path of a reply; null is an empty one."""
        value = reply
        try:
            for step in path:
                value = value[step]
        except (LookupError, TypeError):
            value = False
        if value is not None and not isinstance(value, str):
            raise Unanswered(f"{self.url}: the reply has no string {'.'.join(map(str, path))}: {json.dumps(reply)[:200]}", 200)
        return whole_characters(value or "")

    def complete(self, body):
        """Text of a request with "messages" (chat) or "prompt"."""
        body = {"model": self.served_model(), **body}
        if "messages" in body:
            return self._member(self.call("POST", "/chat/completions", body), "choices", 0, "message", "content")
        return self._member(self.call("POST", "/completions", body), "choices", 0, "text")
