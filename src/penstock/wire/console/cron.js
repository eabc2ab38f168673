/**
 * Cron expressions in words: "0 3 * * 1-5" is "at 03:00, Monday to Friday".
 *
 * The broker judges whether an expression is valid; one that has no short form in words is "" here.
 */

const DAYS = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"];
const MONTHS = "January February March April May June July August September October November December".split(" ");
const SHORTHANDS = {
  "@hourly": "0 * * * *",
  "@daily": "0 0 * * *",
  "@midnight": "0 0 * * *",
  "@weekly": "0 0 * * 0",
  "@monthly": "0 0 1 * *",
  "@yearly": "0 0 1 1 *",
  "@annually": "0 0 1 1 *",
};

const two = (number) => String(number).padStart(2, "0");
const list = (words) => (words.length < 2 ? words.join("") : `${words.slice(0, -1).join(", ")} and ${words.at(-1)}`);

const wordOf = (names, offset) => (text) => {
  const short = names.find((name) => name.slice(0, 3).toLowerCase() === text.toLowerCase());
  return short ?? names[Number(text) - offset] ?? null;
};
const day = wordOf(DAYS, 0);
const month = wordOf(MONTHS, 1);

/** A field of numbers or names in words: values, ranges and lists of them. null: no short form. */
function values(field, word) {
  const parts = field.split(",").map((part) => {
    const [from, to] = part.split("-");
    if (!/^\w+$/.test(from) || (to !== undefined && !/^\w+$/.test(to))) return null;
    const words = [word(from), ...(to === undefined ? [] : [word(to)])];
    return words.includes(null) || words.includes(undefined) ? null : words.join(" to ");
  });
  return parts.includes(null) ? null : list(parts);
}

const every = (field) => field.match(/^\*\/(\d+)$/)?.[1];
const number = (text) => (/^\d+$/.test(text) ? String(Number(text)) : null);

function time(minute, hour) {
  if (minute === "*" && hour === "*") return "every minute";
  if (every(minute) && hour === "*") return `every ${every(minute)} minutes`;
  const minutes = values(minute, number);
  if (hour === "*" && minutes !== null) return minutes === "0" ? "every hour" : `at minute ${minutes} of every hour`;
  if (every(hour) && minutes !== null) return `at minute ${minutes} of every ${every(hour)} hours`;
  if (/^\d+$/.test(minute) && /^\d+(,\d+)*$/.test(hour)) {
    return `at ${list(hour.split(",").map((one) => `${two(one)}:${two(minute)}`))}`;
  }
  const hours = values(hour, number);
  if (hours === null) return null;
  const which =
    minute === "*"
      ? "every minute"
      : every(minute)
        ? `every ${every(minute)} minutes`
        : minutes && `at minute ${minutes}`;
  return which ? `${which} of hours ${hours}` : null;
}

/** @returns {string} "" when there is no short form */
export function inWords(expression) {
  const fields = (SHORTHANDS[expression.trim()] ?? expression).trim().split(/\s+/);
  if (fields.length !== 5) return "";
  const [minute, hour, date, monthField, weekday] = fields;
  const words = [time(minute, hour)];
  const days = [];
  if (date !== "*") {
    const step = every(date);
    const dates = values(date, number);
    days.push(step ? `every ${step} days of the month` : dates && `on day ${dates} of the month`);
  }
  if (weekday !== "*") days.push(values(weekday, day));
  if (days.length) words.push(days.includes(null) ? null : days.join(" or "));
  if (monthField !== "*") {
    const months = values(monthField, month);
    words.push(months && `in ${months}`);
  }
  if (words.includes(null)) return "";
  return words.join(", ");
}
