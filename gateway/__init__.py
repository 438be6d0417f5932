"""HTTP in the dialects of OpenAI and Anthropic: a separate process that is a client of the router.

```
client ──HTTP/1.1──▶ httpd ──ASGI──▶ app ──▶ dialects ──▶ baton.AsyncClient ──gRPC──▶ router
                     bounds of a         routes,  fields in,
                     connection          bodies   events out
```

- `actor`: start and stop of the process; `config`: its settings.
- `app`: routes; a client that disconnects cancels its request. `exchange`: a request's body in, its answer out.
- `fields`: strict JSON, and each field by name. `unread`: the rule for other fields, left out or refused.
- `generation`: the prompts of a request under way, whole or as events; a dialect is one file.
- `choices`: answers of `completions` and `chat`. `conversation`: chats of all dialects, and answers in blocks.
- `observe/openapi`: the page that names all paths and fields. `observe/metrics`: the page that Prometheus reads, of all
  gateways of a cluster.

The gateway keeps no state: when it dies, gRPC clients notice nothing, the router cancels its requests, and a new
gateway starts.
"""
