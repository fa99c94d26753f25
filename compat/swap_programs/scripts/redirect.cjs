// Loaded before a suite whose tests connect to port 6379 of this host: connect to the port in REDIRECT_PORT instead.
const { Socket } = require("node:net");

const DEFAULT_PORT = 6379;
const given = Number(process.env.REDIRECT_PORT);
const connect = Socket.prototype.connect;

Socket.prototype.connect = function (...words) {
  // The first word is a port, the options, or, from net.connect, an array that begins with the options.
  const options = Array.isArray(words[0]) ? words[0][0] : words[0];
  if (Number(options) === DEFAULT_PORT) words[0] = given;
  else if (Number(options?.port) === DEFAULT_PORT) options.port = given;
  return connect.apply(this, words);
};
