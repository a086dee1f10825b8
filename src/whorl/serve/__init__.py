"""The server: an OpenAI-compatible API over one engine, and two pages.

fleet/          several servers as one;  bench/  load on a server, and what it felt like;  pages/  chat and engine

worker.py       the engine in its own thread; commands in, merged deltas out
protocol.py     what may be asked, field by field;  errors.py  how a refusal looks
requests.py     a body becomes engine requests;  answers.py  deltas become text, choices, log-probabilities, usage
generate.py     completions and chat;  responses.py  the newer form;  embeddings.py  vectors;  tools.py  function calls
keys.py         API keys and their limits;  guard.py  what stands before every request;  metrics.py  Prometheus
served.py       what is served: engine, tokenizer, template, names;  app.py  the routes;  run.py  the process

FastAPI is imported in the modules that need it and not here: `whorl --help` stays fast.
"""
