// A device in JavaScript, from protocol.md alone: it joins a run of FedAvg with the model mlp, and trains by itself.
//
//   npm install                          once, in this folder
//   node device.mjs tcp://127.0.0.1:5577 [--server-key KEY|FILE --keys FOLDER]
//
// The samples are those of this machine: fedemu has decoded them into FEDEMU_CACHE, for example by `fedemu validate`.

import { createHash } from "node:crypto";
import { existsSync, readdirSync, readFileSync } from "node:fs";
import { homedir } from "node:os";
import { join } from "node:path";
import { setImmediate } from "node:timers/promises";
import { parseArgs } from "node:util";
import { decode, encode } from "@msgpack/msgpack";
import { Dealer } from "zeromq";

const ARRAYS = {
  F64: Float64Array, F32: Float32Array, I64: BigInt64Array, I32: Int32Array, U8: Uint8Array,
  "<f8": Float64Array, "<f4": Float32Array, "<i8": BigInt64Array, "<i4": Int32Array, "|u1": Uint8Array,
};
const CHUNK = 2 ** 20; // bytes of a blob in one answer
const AGAIN = 2000; // milliseconds until a message that must be answered is sent again

const { values: options, positionals } = parseArgs({
  allowPositionals: true,
  options: { "server-key": { type: "string" }, keys: { type: "string" } },
});
const address = positionals[0] ?? "tcp://127.0.0.1:5577";

// ---- the connection ----

let socket, inbox, sent, heard, beat = 2, patience = 30;

/** The value of a field in one of pyzmq's certificate files. */
function field(file, name) {
  return new RegExp(`^\\s*${name}\\s*=\\s*"(.{40})"`, "m").exec(readFileSync(file, "utf8"))[1];
}

function connect() {
  socket?.close();
  socket = new Dealer({ linger: 1000 });
  if (options["server-key"]) {
    const [server, keys] = [options["server-key"], options.keys ?? join(homedir(), ".config", "fedemu", "keys")];
    socket.curveServerKey = existsSync(server) ? field(server, "public-key") : server;
    socket.curvePublicKey = field(join(keys, "machine.key_secret"), "public-key");
    socket.curveSecretKey = field(join(keys, "machine.key_secret"), "secret-key");
  }
  socket.connect(address);
  heard = sent = Date.now();
  inbox = [];
  read(socket);
}

/** Put what comes from a socket into the inbox, until the socket is closed. */
async function read(from) {
  try {
    for await (const [header, ...frames] of from) {
      heard = Date.now();
      const message = { ...decode(header), frames };
      if (message.t === "stop") end(0);
      else if (message.t === "refused" && !["unknown_peer", "unknown_blob", "lease_unknown", "lease_taken"].includes(message.reason)) end(1, message.detail);
      else if (message.t !== "beat") inbox.push(message);
    }
  } catch (error) {
    if (from === socket) throw error;
  }
}

let turn = Promise.resolve();

/** Send a message. A socket takes one at a time. */
function send(t, fields = {}, frames = []) {
  sent = Date.now();
  const message = [encode({ v: 1, t, ...fields }), ...frames];
  const through = socket;
  turn = turn.then(() => through.send(message)).catch(() => {});
  return turn;
}

async function end(code, words) {
  if (words) console.error(words);
  await send("bye");
  socket.close();
  process.exit(code);
}

/** The next message for which `wanted` is true; undefined after `milliseconds`. Meanwhile the connection is kept alive. */
async function next(wanted, milliseconds = Infinity) {
  const until = Date.now() + milliseconds;
  while (Date.now() < until) {
    const place = inbox.findIndex(wanted);
    if (place >= 0) return inbox.splice(place, 1)[0];
    if (Date.now() - sent > beat * 1000) send("heartbeat");
    if (Date.now() - heard > beat * patience * 1000) throw new Lost();
    await new Promise((resolve) => setTimeout(resolve, 10));
  }
}

class Lost extends Error {}

/** Ask for something, again and again until the answer comes. */
async function ask(t, fields, wanted) {
  for (;;) {
    send(t, fields);
    const answer = await next(wanted, AGAIN);
    if (answer) return answer;
  }
}

// ---- blobs, tensors, and this machine's data ----

/** The bytes of a blob, or null if it is gone. Lost is thrown if the coordinator, started again, does not know us. */
async function fetch(blob) {
  const parts = [];
  for (let offset = 0; offset < blob.size; offset += CHUNK) {
    const length = Math.min(CHUNK, blob.size - offset);
    const answer = await ask("need", { digest: blob.digest, offset, length }, (message) =>
      ["unknown_blob", "unknown_peer"].includes(message.reason) || (message.t === "blob" && message.digest === blob.digest && message.offset === offset));
    if (answer.reason === "unknown_peer") throw new Lost();
    if (answer.t !== "blob") return null;
    parts.push(answer.frames[0]);
  }
  const bytes = Buffer.concat(parts);
  if (createHash("sha256").update(bytes).digest("hex") !== blob.digest) throw new Error(`blob ${blob.digest} is damaged`);
  return bytes;
}

/** A typed array of some bytes, which may begin anywhere. */
function array(type, bytes) {
  return new ARRAYS[type](Uint8Array.from(bytes).buffer);
}

/** The tensors of a file in the safetensors format: {name: {shape, data}}. */
function tensors(bytes) {
  const start = 8 + Number(bytes.readBigUInt64LE(0));
  const { __metadata__, ...entries } = JSON.parse(bytes.subarray(8, start));
  return Object.fromEntries(Object.entries(entries).map(([name, { dtype, shape, data_offsets: [first, last] }]) =>
    [name, { shape, data: array(dtype, bytes.subarray(start + first, start + last)) }]));
}

/** The array of a .npy file: {shape, data}. */
function npy(file) {
  const bytes = readFileSync(file);
  const start = 10 + bytes.readUInt16LE(8);
  const header = bytes.toString("latin1", 10, start);
  const shape = /'shape': \(([\d, ]*)\)/.exec(header)[1].split(",").filter((size) => size.trim()).map(Number);
  return { shape, data: array(/'descr': '([^']+)'/.exec(header)[1], bytes.subarray(start)) };
}

/** The training split with this digest: samples as rows of numbers that the model takes, and labels. */
function decoded(digest) {
  const base = process.env.XDG_CACHE_HOME || join(homedir(), ".cache");
  const folder = join(process.env.FEDEMU_CACHE || join(base, "fedemu"), "datasets");
  for (const name of existsSync(folder) ? readdirSync(folder) : []) {
    const file = join(folder, name, "meta.json");
    if (!existsSync(file)) continue;
    const meta = JSON.parse(readFileSync(file));
    if (meta.digest !== digest) continue;
    const x = npy(join(folder, name, "train.x.npy"));
    const [channels, ...sides] = meta.input_shape;
    const pixels = sides.reduce((a, b) => a * b, 1);
    const width = channels * pixels;
    const value = (i, j) => {
      const channel = Math.floor(j / pixels);
      return (x.data[i * width + j] - meta.mean[channel]) / meta.std[channel];
    };
    const row = (i) => Float32Array.from({ length: width }, (_, j) => value(i, j));
    return { row, labels: npy(join(folder, name, "train.y.npy")).data };
  }
  return null;
}

// ---- training ----

/** One step of SGD on a batch of rows: the mean cross-entropy of a perceptron with ReLU. Returns the loss. */
function step(layers, rows, labels, { lr, momentum, weight_decay: decay }) {
  const gradients = layers.map(({ weight, bias }) => ({ weight: new Float64Array(weight.length), bias: new Float64Array(bias.length) }));
  let loss = 0;
  rows.forEach((row, k) => {
    const inputs = [row];
    for (const [depth, { weight, bias, width }] of layers.entries()) {
      const x = inputs[depth];
      inputs.push(Float64Array.from(bias, (start, o) => {
        let sum = start;
        for (let i = 0; i < width; i++) sum += weight[o * width + i] * x[i];
        return depth < layers.length - 1 ? Math.max(0, sum) : sum;
      }));
    }
    const logits = inputs.at(-1);
    const highest = logits.reduce((a, b) => Math.max(a, b));
    const total = logits.reduce((sum, logit) => sum + Math.exp(logit - highest), 0);
    loss += (highest + Math.log(total) - logits[labels[k]]) / rows.length;
    let error = logits.map((logit, o) => (Math.exp(logit - highest) / total - (o === labels[k])) / rows.length);
    for (let depth = layers.length - 1; depth >= 0; depth--) {
      const { weight, width } = layers[depth], x = inputs[depth], back = new Float64Array(width);
      error.forEach((e, o) => {
        gradients[depth].bias[o] += e;
        for (let i = 0; i < width; i++) {
          gradients[depth].weight[o * width + i] += e * x[i];
          back[i] += e * weight[o * width + i];
        }
      });
      error = back.map((e, i) => (x[i] > 0 ? e : 0)); // of the row itself it is not used
    }
  });
  layers.forEach((layer, depth) => {
    for (const part of ["weight", "bias"]) {
      const leaf = layer[part], velocity = layer.velocity[part];
      gradients[depth][part].forEach((gradient, i) => {
        velocity[i] = momentum * velocity[i] + gradient + decay * leaf[i];
        leaf[i] -= lr * velocity[i];
      });
    }
  });
  return loss;
}

/** Train a global model on this device's samples. Returns the fields and the frames of the result. */
async function train(model, samples, work) {
  const began = Date.now();
  const names = Object.keys(model).filter((name) => name.endsWith(".weight")).map((name) => name.slice(0, -".weight".length));
  names.sort((a, b) => Number(a.slice(2)) - Number(b.slice(2))); // fc1, fc2, ...
  const layers = names.map((name) => {
    const [weight, bias] = ["weight", "bias"].map((part) => Float64Array.from(model[`${name}.${part}`].data));
    const velocity = { weight: new Float64Array(weight.length), bias: new Float64Array(bias.length) };
    return { weight, bias, velocity, width: model[`${name}.weight`].shape[1] };
  });
  const { local } = experiment;
  const rate = { ...local, lr: local.lr * local.lr_decay ** (Number(work.ask.split(".")[0]) - 1) };
  const batches = Math.ceil(samples.length / local.batch_size);
  const steps = samples.length ? local.steps || local.epochs * batches : 0;
  let order, loss = 0;
  for (let taken = 0; taken < steps; taken++) {
    const place = taken % batches;
    if (place === 0) order = batches > 1 ? shuffled(samples) : samples;
    const batch = order.slice(place * local.batch_size, (place + 1) * local.batch_size);
    loss += step(layers, batch.map(data.row), batch.map((i) => Number(data.labels[i])), rate) / steps;
    await setImmediate(); // so that messages are read meanwhile
    if (Date.now() - sent > beat * 1000) send("heartbeat");
  }
  const specs = [], frames = [];
  names.forEach((name, depth) => {
    for (const part of ["weight", "bias"]) {
      const { shape, data: before } = model[`${name}.${part}`];
      const delta = Float32Array.from(before, (value, i) => layers[depth][part][i] - value);
      specs.push({ name: `delta/${name}.${part}`, dtype: "float32", shape });
      frames.push(Buffer.from(delta.buffer));
    }
  });
  const seconds = (Date.now() - began) / 1000;
  return [{ examples: samples.length, steps, metrics: steps ? { loss } : {}, seconds, tensors: specs }, frames];
}

function shuffled(values) {
  const order = [...values];
  for (let i = order.length - 1; i > 0; i--) {
    const j = Math.floor(Math.random() * (i + 1));
    [order[i], order[j]] = [order[j], order[i]];
  }
  return order;
}

/** The device's samples in this work: those of its period that have arrived (of all periods so far, if they stay). */
function holding(partition, device, { task, start }) {
  const [first, last] = [0, 1].map((k) => Number(partition.offsets.data[device + k]));
  const [, seconds, cumulative] = partition.rules.data;
  const found = [];
  for (let i = first; i < last; i++) {
    const period = Number(partition.periods.data[i]);
    const there = period === task || (cumulative && period < task);
    if (there && period * seconds + partition.seconds.data[i] <= start) found.push(Number(partition.indices.data[i]));
  }
  return found;
}

// ---- the life of the device ----

let granted; // the answer to enroll
connect();
const [experiment, partition] = await enrol();
const device = granted.ranges[0][0];
const data = decoded(granted.data);
const { algorithm, model: network, local } = experiment;
if (!data) await end(1, `no data with the digest ${granted.data} in FEDEMU_CACHE; decode them with fedemu validate`);
const known = algorithm.name === "fedavg" && algorithm.loss === "cross_entropy" && !Object.keys(algorithm.terms).length
  && network.name === "mlp" && !network.projection && !local.augment.length && !local.lr_restart
  && local.precision === "float32" && experiment.replay.strategy === "none" && experiment.stream.kind !== "classes";
if (!known) await end(1, "this device knows only FedAvg with cross-entropy and the model mlp, without replay and augmentation");
const works = new Map(), results = new Map();
let incarnation = 0, clock;

for (;;) {
  try {
    await live();
  } catch (error) {
    if (!(error instanceof Lost)) throw error;
    connect(); // come back: a fresh socket, and the next incarnation
  }
  incarnation++;
}

/** Take a place, and fetch what it takes: the experiment and the partition. A coordinator may be started again meanwhile. */
async function enrol() {
  for (;;) {
    try {
      const lease = granted ? { lease: granted.lease } : {};
      const answer = await ask("enroll", { count: 1, ...lease }, (message) =>
        message.t === "granted" || message.reason === "lease_unknown");
      granted = answer.t === "granted" ? answer : undefined;
      if (!granted) continue;
      const files = [await fetch(granted.experiment), await fetch(granted.partition)];
      if (!files.includes(null)) return [JSON.parse(files[0]), tensors(files[1])];
    } catch (error) {
      if (!(error instanceof Lost)) throw error;
      if (!granted) await end(1, `the coordinator at ${address} is silent`);
      connect();
    }
  }
}

/** One incarnation: say hello, announce the presence, do what is asked. Returns when the coordinator forgot us. */
async function live() {
  const welcome = await ask("hello", { device, incarnation, lease: granted.lease }, (message) =>
    message.t === "welcome" || ["unknown_peer", "lease_unknown"].includes(message.reason));
  if (welcome.reason === "lease_unknown") return enrolAgain();
  if (welcome.t !== "welcome") return;
  ({ heartbeat_seconds: beat, patience, clock } = welcome);
  if (clock === "virtual") send("presence", { until: Infinity, intervals: [[0, Infinity]] });
  for (const result of results.values()) Object.assign(result, { pause: 0, due: 0 });
  for (;;) {
    for (const [name, { due }] of results) if (Date.now() >= due) reply(name);
    const message = await next(() => true, 200);
    if (!message) continue;
    if (message.reason === "unknown_peer") return;
    else if (message.t === "work") await take(message);
    else if (message.t === "proceed" && works.has(message.ask)) await answer(works.get(message.ask));
    else if (["accepted", "duplicate", "late", "invalid", "cancel"].includes(message.t)) {
      works.delete(message.ask);
      results.delete(message.ask);
    }
  }
}

/** Get the same place back: an edge has a new connection, on which this device's lease was not granted yet. */
async function enrolAgain() {
  connect();
  const answer = await ask("enroll", { count: 1, lease: granted.lease }, (message) =>
    message.t === "granted" || message.reason === "lease_unknown");
  if (answer.t !== "granted") await end(1, answer.detail);
}

/** Work has come. Under the virtual clock the device says when it would be done: a second after it began. */
async function take(work) {
  const { ask: name, epoch, start } = work;
  if (results.get(name)?.fields.epoch !== epoch) results.delete(name); // of an earlier life of the coordinator
  works.set(name, work);
  if (clock === "virtual") send("scheduled", { ask: name, epoch, event: "finish", at: start + 1 });
  else await answer(work);
}

async function answer(work) {
  if (!results.has(work.ask)) {
    const bytes = await fetch(work.shared.find(({ key }) => key === "model"));
    if (!bytes) return;
    const [fields, frames] = await train(tensors(bytes), holding(partition, device, work), work);
    results.set(work.ask, { fields: { ask: work.ask, epoch: work.epoch, ...fields }, frames, pause: 0 });
  }
  reply(work.ask);
}

/** Send a result. Without an answer it is sent again, each time after twice the pause. */
function reply(name) {
  const result = results.get(name);
  const expiry = beat * patience * 1000;
  result.pause = result.pause ? Math.min(2 * result.pause, 8 * expiry) : expiry;
  result.due = Date.now() + result.pause;
  send("result", result.fields, result.frames);
}
