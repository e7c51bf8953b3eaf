// Talking to the server: the key, JSON, and the events of a stream.

const KEY = "ringcast-api-key";

export class ApiError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

export const hasKey = () => sessionStorage.getItem(KEY) !== null;
export const setKey = (key) => sessionStorage.setItem(KEY, key);

function headers() {
  const key = sessionStorage.getItem(KEY);
  return key === null ? {} : { Authorization: `Bearer ${key}` };
}

async function ask(path, options) {
  let answer;
  try {
    answer = await fetch(path, { ...options, headers: { ...options.headers, ...headers() } });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    if (error.name === "TimeoutError") throw new ApiError("The server does not answer.");
    throw new ApiError("The server can't be reached.");
  }
  if (answer.ok) return answer;
  throw new ApiError(await words(answer), answer.status);
}

async function words(answer) {
  const text = await answer.text().catch(() => "");
  let said = "";
  try {
    said = JSON.parse(text).error.message;
  } catch {
    said = `The server answered ${answer.status} ${answer.statusText}`.trim();
  }
  const seconds = answer.headers.get("Retry-After");
  return seconds ? `${said} (try again in ${seconds} s)` : said;
}

export async function getJson(path, milliseconds) {
  const answer = await ask(path, { signal: AbortSignal.timeout(milliseconds), cache: "no-store" });
  try {
    return await answer.json();
  } catch {
    throw new ApiError("The answer broke off.");
  }
}

// The events of a streamed answer, parsed, up to [DONE].
export async function* stream(path, body, signal) {
  const answer = await ask(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) throw new ApiError("The connection broke before the answer was complete.");
      rest += value;
      const events = rest.split("\n\n");
      rest = events.pop();
      for (const event of events) {
        if (!event.startsWith("data: ")) continue;
        const data = event.slice("data: ".length);
        if (data === "[DONE]") return;
        const message = JSON.parse(data);
        if (message.error) throw new ApiError(message.error.message);
        yield message;
      }
    }
  } catch (error) {
    if (error instanceof TypeError)
      throw new ApiError("The connection broke before the answer was complete.");
    throw error;
  } finally {
    reader.cancel().catch(() => {});
  }
}
