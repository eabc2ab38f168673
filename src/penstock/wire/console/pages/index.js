/** Every view of the Console. */
import { deadLetters } from "./dead_letters.js";
import { message } from "./messages.js";
import { buffers, pipelines } from "./operations.js";
import { overview } from "./overview.js";
import { queue } from "./queue.js";
import { queues } from "./queues.js";
import { route, routes } from "./routes.js";
import { schedules } from "./schedules.js";
import { system } from "./system.js";
import { topic, topics } from "./topics.js";

export const pages = [
  overview,
  queues,
  queue,
  message,
  deadLetters,
  topics,
  topic,
  routes,
  route,
  schedules,
  buffers,
  pipelines,
  system,
];
