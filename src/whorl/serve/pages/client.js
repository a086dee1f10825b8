// Client of the HTTP API: requests, streams of server-sent events, error messages.
//
// The API has OpenAI's format, so these pages also work with other servers of that format. Chat and completion streams have
// different formats; both are converted to chunks
//     {text, tokens: [{bytes, logprob, alternatives: [{bytes, logprob}]}], finish, usage, feedback, sources}
// feedback: {token, expires} of a completion that the server keeps. sources: [{number, id, title, text}] of its prompt.
// URLs are relative to the page, so the server may run under a path of a larger site. A generation is cancelled by closing
// its connection (AbortController).

const apiUrl = (path) => new URL(path, document.baseURI);

/** An error with a message for the user. kind: offline, key, busy, rejected, failed or broken. */
export class ServerError extends Error {
  constructor(kind, message) {
    super(message);
    this.kind = kind;
  }
}

async function toServerError(response, key) {
  let message = "", param = "";
  try {
    const body = await response.json();
    message = String(body.error?.message ?? body.detail ?? "");
    param = body.error?.param ?? "";
  } catch {
    // Not JSON, probably the error page of a proxy: the status is reported.
  }
  const { status } = response;
  const detail = message ? ` Message: ${message}` : "";
  if (status === 401 || (status === 403 && !param)) {
    return new ServerError("key", key ? `The server rejected this API key.${detail}` : "The server requires an API key. Enter it under Settings.");
  }
  if (status === 429 || status === 503) {
    const wait = Number(response.headers.get("retry-after"));
    return new ServerError("busy", `The server is busy${wait ? `; retry in ${wait} s` : ""}.${detail}`);
  }
  if (status >= 500) return new ServerError("failed", `The server failed (${status}).${detail}`);
  const field = param && !message.includes(param) ? ` (field ${param})` : "";
  return new ServerError("rejected", message ? `${message}${field}` : `The server rejected the request (${status}).`);
}

/** fetch with the API key. Throws ServerError, or AbortError unchanged. */
async function request(path, { key = "", actor = "", body, signal } = {}) {
  const headers = { accept: "application/json, text/event-stream" };
  if (key) headers.authorization = `Bearer ${key}`;
  if (actor) headers["x-whorl-actor"] = actor;
  if (body !== undefined) headers["content-type"] = "application/json";
  let response;
  try {
    response = await fetch(apiUrl(path), { method: body === undefined ? "GET" : "POST", headers, signal, cache: "no-store", body: body === undefined ? undefined : JSON.stringify(body) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("offline", "The server is unreachable. Is it still running?");
  }
  if (!response.ok) throw await toServerError(response, key);
  return response;
}

/** GET, as JSON. */
export async function get(path, options) {
  const response = await request(path, options);
  try {
    return await response.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("broken", "The response is not JSON. Is this a Whorl server?");
  }
}

/** POST of JSON, with a JSON response. */
export const post = (path, body, options = {}) => get(path, { ...options, body });

/**
 * The generation models as [{id, chat, log, compare}]. log: whether the server keeps completions of users who consent; compare:
 * share of prompts with two answers. chat: whether the model has a chat template. A Whorl server reports it (whorl.chat,
 * or the template "transcript" for a model without one); for other servers it is assumed.
 */
export async function listModels(options) {
  const { data } = await get("v1/models", options);
  return (Array.isArray(data) ? data : [])
    .filter((model) => !Array.isArray(model.capabilities) || model.capabilities.includes("completion"))
    .map((model) => ({ id: String(model.id), chat: model.whorl?.chat ?? model.chat !== "transcript", log: model.whorl?.log ?? false, search: model.whorl?.search ?? false, compare: model.whorl?.compare ?? 0 }));
}

/**
 * Yields the data of each server-sent event. bytes: ReadableStream. Lines end in LF, CR or CRLF and may be cut anywhere, even
 * inside a character. An incomplete last event is dropped.
 */
export async function* events(bytes) {
  const reader = bytes.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "", data = [];
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (buffer + value).split(/\r\n|\n|\r(?!$)/); // a CR at the end may be half of a CRLF
      buffer = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
        else if (line === "" && data.length) {
          yield data.join("\n");
          data = [];
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // closes the connection if the caller stops early
  }
}

const encoder = new TextEncoder();
const ESCAPED = /^bytes:((?:\\x[0-9a-f]{2})+)$/i; // completions write a token that is not valid UTF-8 like this

function bytesOf(token, bytes) {
  if (Array.isArray(bytes)) return Uint8Array.from(bytes);
  const escaped = ESCAPED.exec(token);
  return escaped ? Uint8Array.from(escaped[1].slice(2).split("\\x"), (hex) => parseInt(hex, 16)) : encoder.encode(token);
}

const tokenLogprob = (entry) => ({ bytes: bytesOf(entry.token, entry.bytes), logprob: entry.logprob });

/** The tokens of a choice's `logprobs` in either format; empty if absent. */
function tokensOf(logprobs) {
  if (!logprobs) return [];
  if (logprobs.content) return logprobs.content.map((entry) => ({ ...tokenLogprob(entry), alternatives: (entry.top_logprobs ?? []).map(tokenLogprob) }));
  return (logprobs.tokens ?? []).map((token, i) => ({
    bytes: bytesOf(token, logprobs.bytes?.[i]),
    logprob: logprobs.token_logprobs?.[i] ?? null,
    alternatives: Object.entries(logprobs.top_logprobs?.[i] ?? {})
      .map(([text, logprob]) => ({ bytes: bytesOf(text), logprob }))
      .sort((a, b) => b.logprob - a.logprob),
  }));
}

/** Streams one response. kind: "chat" or "complete"; body: the request without the stream fields. Yields chunks (see above). */
export async function* stream(kind, body, options) {
  const path = kind === "chat" ? "v1/chat/completions" : "v1/completions";
  const response = await request(path, { ...options, body: { ...body, stream: true, stream_options: { include_usage: true } } });
  let ended = false;
  try {
    for await (const data of events(response.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ServerError("failed", `The server aborted the response: ${chunk.error.message ?? "unknown reason"}`);
      const choice = chunk.choices?.[0] ?? {};
      if (choice.finish_reason) ended = true;
      yield {
        text: (kind === "chat" ? choice.delta?.content : choice.text) ?? "",
        tokens: tokensOf(choice.logprobs),
        finish: choice.finish_reason ?? null,
        usage: chunk.usage ?? null,
        feedback: chunk.feedback ?? null,
        sources: chunk.sources ?? null,
      };
    }
  } catch (error) {
    if (error instanceof ServerError || error.name === "AbortError") throw error;
    if (error instanceof SyntaxError) throw new ServerError("broken", "The stream contains invalid JSON.");
    throw new ServerError("broken", "The connection was lost before the response was complete.");
  }
  if (!ended) throw new ServerError("broken", "The connection ended before the response was complete.");
}
