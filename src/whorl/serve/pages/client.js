// The pages' side of the HTTP API: requests, streams of server-sent events, and what went wrong in words.
//
// The API is OpenAI's shape, so that these pages would also talk to another server of that shape. What differs between its
// two ways of streaming, chat and plain completion, ends here: both become a series of parts
//     {text, tokens: [{bytes, logprob, others: [{bytes, logprob}]}], finish, usage}
// Addresses are relative to the page, so the server may live under a path of a larger site. A generation is cancelled by
// closing its connection (AbortController): nothing else has to be told.

const address = (path) => new URL(path, document.baseURI);

/** What went wrong, in words for the person before the page. `kind` says what may help: offline, key, busy, refused, failed, broken. */
export class ServerError extends Error {
  constructor(kind, words) {
    super(words);
    this.kind = kind;
  }
}

async function words(response, key) {
  let said = "", param = "";
  try {
    const body = await response.json();
    said = String(body.error?.message ?? body.detail ?? "");
    param = body.error?.param ?? "";
  } catch {
    // Not JSON: a proxy's page, most likely. The status says enough.
  }
  const { status } = response;
  const also = said ? ` It says: ${said}` : "";
  if (status === 401 || status === 403) {
    return new ServerError("key", key ? `The server does not accept this API key.${also}` : "The server asks for an API key: put yours under Settings.");
  }
  if (status === 429 || status === 503) {
    const wait = Number(response.headers.get("retry-after"));
    return new ServerError("busy", `The server takes no more requests at the moment${wait ? `; it will again in ${wait} s` : ""}.${also}`);
  }
  if (status >= 500) return new ServerError("failed", `The server failed (${status}).${also}`);
  const field = param && !said.includes(param) ? ` (field ${param})` : "";
  return new ServerError("refused", said ? `${said}${field}` : `The server refused the request (${status}).`);
}

/** fetch, with the key, or a ServerError; an AbortError passes through. */
async function ask(path, { key = "", body, signal } = {}) {
  const headers = { accept: "application/json, text/event-stream" };
  if (key) headers.authorization = `Bearer ${key}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  let response;
  try {
    response = await fetch(address(path), { method: body === undefined ? "GET" : "POST", headers, signal, cache: "no-store", body: body === undefined ? undefined : JSON.stringify(body) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("offline", "The server cannot be reached. Is it still running?");
  }
  if (!response.ok) throw await words(response, key);
  return response;
}

/** GET, as JSON. */
export async function get(path, options) {
  const response = await ask(path, options);
  try {
    return await response.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("broken", "The server sent something that is not JSON. Is this a Whorl server?");
  }
}

/**
 * [{id, chat}] of the models that write text. chat: whether it knows turns. A Whorl server names the template (a "transcript"
 * is what it makes do with for a model that has none) or says it outright (whorl.chat); of others one may assume it.
 */
export async function models(options) {
  const { data } = await get("v1/models", options);
  return (Array.isArray(data) ? data : [])
    .filter((model) => !Array.isArray(model.capabilities) || model.capabilities.includes("completion"))
    .map((model) => ({ id: String(model.id), chat: model.whorl?.chat ?? model.chat !== "transcript" }));
}

/**
 * The data of each event of a server-sent stream. bytes: ReadableStream. Lines end in LF, CR or CRLF and may be cut anywhere,
 * in the middle of a character too; an event that the end of the stream cuts off is not given.
 */
export async function* events(bytes) {
  const reader = bytes.pipeThrough(new TextDecoderStream()).getReader();
  let kept = "", data = [];
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (kept + value).split(/\r\n|\n|\r(?!$)/); // a CR at the end may be half of a CRLF
      kept = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
        else if (line === "" && data.length) {
          yield data.join("\n");
          data = [];
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // closes the connection where we stop reading early
  }
}

const encoder = new TextEncoder();
const ESCAPED = /^bytes:((?:\\x[0-9a-f]{2})+)$/i; // how completions write a token that is no text by itself

function bytesOf(token, bytes) {
  if (Array.isArray(bytes)) return Uint8Array.from(bytes);
  const escaped = ESCAPED.exec(token);
  return escaped ? Uint8Array.from(escaped[1].slice(2).split("\\x"), (hex) => parseInt(hex, 16)) : encoder.encode(token);
}

const one = (entry) => ({ bytes: bytesOf(entry.token, entry.bytes), logprob: entry.logprob });

/** Tokens of a choice's `logprobs`, in either shape; none where there is none. */
function tokensOf(logprobs) {
  if (!logprobs) return [];
  if (logprobs.content) return logprobs.content.map((entry) => ({ ...one(entry), others: (entry.top_logprobs ?? []).map(one) }));
  return (logprobs.tokens ?? []).map((token, i) => ({
    bytes: bytesOf(token, logprobs.bytes?.[i]),
    logprob: logprobs.token_logprobs?.[i] ?? null,
    others: Object.entries(logprobs.top_logprobs?.[i] ?? {})
      .map(([text, logprob]) => ({ bytes: bytesOf(text), logprob }))
      .sort((a, b) => b.logprob - a.logprob),
  }));
}

/** Streams one answer. kind: "chat" or "complete"; body: the request without what asks for a stream. Yields parts (see above). */
export async function* stream(kind, body, options) {
  const path = kind === "chat" ? "v1/chat/completions" : "v1/completions";
  const response = await ask(path, { ...options, body: { ...body, stream: true, stream_options: { include_usage: true } } });
  let ended = false;
  try {
    for await (const data of events(response.body)) {
      if (data === "[DONE]") return;
      const part = JSON.parse(data);
      if (part.error) throw new ServerError("failed", `The server broke off: ${part.error.message ?? "it does not say why"}`);
      const choice = part.choices?.[0] ?? {};
      if (choice.finish_reason) ended = true;
      yield {
        text: (kind === "chat" ? choice.delta?.content : choice.text) ?? "",
        tokens: tokensOf(choice.logprobs),
        finish: choice.finish_reason ?? null,
        usage: part.usage ?? null,
      };
    }
  } catch (error) {
    if (error instanceof ServerError || error.name === "AbortError") throw error;
    if (error instanceof SyntaxError) throw new ServerError("broken", "The server sent something that is not JSON in mid-stream.");
    throw new ServerError("broken", "The connection broke off before the answer was whole.");
  }
  if (!ended) throw new ServerError("broken", "The connection ended before the answer was whole.");
}
