"""An HTTP/1.1 server for the gateway and the router's metrics: asyncio's transports, httptools' parser, ASGI's form.

```
bytes ──▶ request_reader ──▶ connection ──▶ answer ──ASGI──▶ application
          requests, and the   one deadline   receive, send,
          fault behind them   at a time      framing
```

- `server`: a port, from start to stop, with limits on its connections and on the heads of an iteration.
- `connection`: requests one after another; good requests are answered before a fault after them.
- `request_reader`: bytes to requests, with bounds on heads, trailers and lines; `answer`: one request under way.
- `errors`: each error as status and OpenAI's envelope.
"""
