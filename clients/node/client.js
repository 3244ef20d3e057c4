// Talks to Tokenmill over gRPC: lists models, streams a chat, cancels it, sets a deadline, reads error details.
'use strict';

const fs = require('node:fs');
const path = require('node:path');
const { parseArgs } = require('node:util');
const grpc = require('@grpc/grpc-js');
const protoLoader = require('@grpc/proto-loader');
const protobuf = require('protobufjs');

const PROTOS = path.join(__dirname, '..', '..', 'protos');
const GOOGLE = path.join(__dirname, '..', 'third_party');
const USAGE = `usage: client --address HOST:PORT [--tls [--ca FILE]] [--key KEY] models
       client --address HOST:PORT [--tls [--ca FILE]] [--key KEY] chat PROMPT
              [--max-tokens N] [--cancel-after CHUNKS] [--deadline SECONDS]`;

async function main() {
  const { flags, command, prompt } = parse();
  const credentials = flags.tls
    ? grpc.credentials.createSsl(flags.ca ? fs.readFileSync(flags.ca) : null)
    : grpc.credentials.createInsecure();
  const definition = protoLoader.loadSync('tokenmill/inference/v1/inference.proto', {
    includeDirs: [PROTOS], enums: String,
  });
  const { Inference } = grpc.loadPackageDefinition(definition).tokenmill.inference.v1;
  const inference = new Inference(flags.address, credentials);
  const metadata = new grpc.Metadata();
  if (flags.key) metadata.set('authorization', `Bearer ${flags.key}`);
  try {
    await (command === 'models' ? listModels(inference, metadata) : chat(inference, metadata, prompt, flags));
  } catch (error) {
    if (!(error.metadata instanceof grpc.Metadata)) throw error;
    const { code, param } = readDetails(error);
    console.error(`error: code=${code} param=${param}: ${error.details}`);
    process.exitCode = 1;
  } finally {
    inference.close();
  }
}

function parse() {
  try {
    const { values, positionals } = parseArgs({
      allowPositionals: true,
      options: {
        address: { type: 'string' }, tls: { type: 'boolean' }, ca: { type: 'string' }, key: { type: 'string' },
        'max-tokens': { type: 'string' }, 'cancel-after': { type: 'string' }, deadline: { type: 'string' },
      },
    });
    const [command, prompt] = positionals;
    if (!values.address) throw new Error('--address is missing');
    if (positionals.length !== { models: 1, chat: 2 }[command]) throw new Error('give models, or chat PROMPT');
    const flags = {
      ...values,
      maxTokens: number(values, 'max-tokens'),
      cancelAfter: number(values, 'cancel-after'),
      deadline: number(values, 'deadline'),
    };
    return { flags, command, prompt };
  } catch (error) {
    console.error(`${USAGE}\nclient: ${error.message}`);
    process.exit(2);
  }
}

function number(values, name) {
  if (values[name] === undefined) return undefined;
  const value = Number(values[name]);
  if (!Number.isFinite(value)) throw new Error(`--${name} must be a number`);
  return value;
}

function listModels(inference, metadata) {
  return new Promise((resolve, reject) => {
    inference.listModels({}, metadata, (error, response) => {
      if (error) return reject(error);
      for (const { name, maxModelLen, readyWorkers } of response.models) {
        console.log([name, maxModelLen, readyWorkers].join('\t'));
      }
      resolve();
    });
  });
}

// Prints the answer as it comes. The model is left open: the only one served.
async function chat(inference, metadata, prompt, { maxTokens, cancelAfter, deadline }) {
  const request = { messages: [{ role: 'user', content: prompt }], sampling: { temperature: 0, maxTokens } };
  const options = deadline === undefined ? {} : { deadline: Date.now() + deadline * 1000 };
  const call = inference.chat(request, metadata, options);
  let chunks = 0;
  for await (const { text, finishReason, usage } of call) {
    process.stdout.write(text);
    chunks += 1;
    if (usage) {
      const reason = finishReason.replace('FINISH_REASON_', '').toLowerCase();
      console.error(`\nfinished: ${reason}, ${usage.completionTokens} tokens`);
    } else if (chunks === cancelAfter) {
      call.on('error', () => {}); // gRPC tells us of our own cancelling
      call.cancel(); // the server stops at once
      console.error(`\ncancelled after ${chunks} chunks`);
      break;
    }
  }
  process.stdout.write('\n');
}

// Our code and the field at fault; for a call that never reached Tokenmill, gRPC's own code.
function readDetails(error) {
  const root = new protobuf.Root();
  root.resolvePath = (_, target) =>
    [PROTOS, GOOGLE].map((folder) => path.join(folder, target)).find((file) => fs.existsSync(file)) ?? target;
  root.loadSync(['google/rpc/status.proto', 'tokenmill/common/v1/common.proto']);
  for (const status of error.metadata.get('grpc-status-details-bin')) {
    for (const { type_url: url, value } of root.lookupType('google.rpc.Status').decode(status).details) {
      if (url.endsWith('/tokenmill.common.v1.ErrorDetail')) {
        return root.lookupType('tokenmill.common.v1.ErrorDetail').decode(value);
      }
    }
  }
  return { code: grpc.status[error.code].toLowerCase(), param: '' };
}

main();
