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


class Endpoint:
    def __init__(self, url, api_key=None, model=None):
        parts = urllib.parse.urlsplit(url if "://" in url else "http://" + url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise Unanswered(f"\"{url}\" is no http or https URL")
        self.kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self.host, self.port = parts.hostname, parts.port
        self.path = parts.path.rstrip("/")
        if not self.path.endswith("/v1"):
            self.path += "/v1"
        self.url, self.api_key, self.model = url, api_key, model
        self.local = threading.local()

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
                continue
            if status == 200:
                return json.loads(raw)
            why = f"{status}: {raw[:200].decode(errors='replace')}"
            if status not in (429, 500, 502, 503, 504):
                break
        raise Unanswered(f"{self.url}: {why}", status)

    def served_model(self):
        """The model's name: what was given, else the first that the endpoint lists."""
        if not self.model:
            self.model = self.call("GET", "/models")["data"][0]["id"]
        return self.model

    def complete(self, body):
        """Text of a request with "messages" (chat) or "prompt"."""
        body = {"model": self.served_model(), **body}
        if "messages" in body:
            return self.call("POST", "/chat/completions", body)["choices"][0]["message"]["content"] or ""
        return self.call("POST", "/completions", body)["choices"][0]["text"]
