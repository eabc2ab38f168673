/** Every view of the Console. */
import { buffers } from "./buffers.js";
import { deadLetters } from "./dead_letters.js";
import { message } from "./messages.js";
import { overview } from "./overview.js";
import { pipeline, pipelines } from "./pipelines.js";
import { queue } from "./queue.js";
import { queues } from "./queues.js";
import { record } from "./records.js";
import { route, routes } from "./routes.js";
import { schedules } from "./schedules.js";
import { system } from "./system.js";
import { topic } from "./topic.js";
import { topics } from "./topics.js";

export const pages = [
  overview,
  queues,
  queue,
  message,
  deadLetters,
  topics,
  topic,
  record,
  routes,
  route,
  buffers,
  pipelines,
  pipeline,
  schedules,
  system,
];
