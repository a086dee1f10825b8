"""The server: an OpenAI-compatible HTTP API over one engine, and its web pages.

    server.py       the process: uvicorn, signals, draining        config.py   settings      errors.py   error responses
    app_state.py    state that all routes share; admission of requests to the engine
    api/            routes: completions, chat, responses, embeddings, tools; request parsing and response formatting
    middleware/     API keys, rate limits, admission, Prometheus metrics
    worker/         the engine thread, model loading, engine state
    completion_log.py   completions that users let the server keep, and feedback on them
    arena.py        the server of an arena: blind votes between models
    pages/          files of the pages: chat, engine, feed, loop, arena. page_files.py: their routes

FastAPI is imported only in the modules that use it, so that `whorl --help` stays fast.
"""
