<?php
// Predis: requests, pipelines, transactions with WATCH, scripts, messages; the cluster client.

error_reporting(E_ALL & ~E_DEPRECATED);
require __DIR__ . '/steps.php';
require 'Predis/autoload.php';

const LIMITS = ['timeout' => WAIT_S_MAX, 'read_write_timeout' => WAIT_S_MAX];

function connected(): Predis\Client
{
    $given = ['scheme' => 'tls', 'ssl' => ['cafile' => CA], 'username' => USER, 'password' => PASSWORD];
    return new Predis\Client(['host' => HOST, 'port' => PORT] + LIMITS + (CA ? $given : []));
}

function cluster(): void
{
    $client = new Predis\Client(['tcp://' . HOST . ':' . PORT], ['cluster' => 'redis', 'parameters' => LIMITS]);
    $all = fn () => array_map([$client, 'get'], all_texts()); // MGET is for keys of one slot
    $expected = $all();
    step('texts of all slots', $all);
    step('a map', fn () => sorted($client->hgetall('job:map:flight')));
    ask('kill', text(7));
    step("after a server's end", fn () => until_equal($all, $expected));
    ask('put', 'job:text:live', '2');
    step('a new value after it', fn () => until_equal(fn () => $client->get('job:text:live'), '2'));
}

function refused_writes(Predis\Client $client): void
{
    step('a refused write', fn () => $client->set(text(7), 'x'));
    step('a read after it', fn () => $client->get(text(7)));
    step('a refused transaction', fn () => $client->transaction(fn ($transaction) => $transaction->set(text(7), 'x')));
}

if (PLACE == 'cluster') {
    cluster();
    exit;
}
$client = connected();
step('GET', fn () => $client->get(text(7)));
step('a missing key', fn () => $client->get('job:text:none'));
step('MGET', fn () => $client->mget([text(1), 'job:text:none', text(299)]));
step('a pipeline', fn () => $client->pipeline(fn ($pipeline) => array_map([$pipeline, 'get'], all_texts())));
step('WRONGTYPE', fn () => $client->hgetall(text(7)));
if (PLACE == 'tls') {
    step('a key of others', fn () => $client->hlen('job:map:flight'));
    refused_writes($client);
    exit;
}
step('HGETALL', fn () => sorted($client->hgetall('job:map:flight')));
step('HSCAN', fn () => iterator_count(new Predis\Collection\Iterator\HashKey($client, 'job:map:large')));
step('LRANGE', fn () => $client->lrange('job:list:alerts', 0, -1));
step('SMEMBERS', fn () => sorted($client->smembers('job:set:airports')));
step('ZRANGE', fn () => $client->zrange('job:ranks:delays', 0, -1, ['withscores' => true]));
step('SCAN', fn () => sorted(array_values(array_unique(iterator_to_array(
    new Predis\Collection\Iterator\Keyspace($client, 'job:text:1*', 1000),
    false
)))));
step('MULTI', fn () => $client->transaction(function ($transaction) {
    $transaction->get(text(7));
    $transaction->hget('job:map:flight', 'to');
    $transaction->lrange('job:list:alerts', 0, 0);
}));
step('WATCH', function () use ($client) {
    ask('put', 'job:text:watched', '1');
    $tries = 0;
    $found = $client->transaction(['watch' => 'job:text:watched', 'cas' => true, 'retry' => 3], function ($transaction) use (&$tries) {
        if (++$tries == 1) {
            ask('put', 'job:text:watched', '2');
        }
        $transaction->multi();
        $transaction->get('job:text:watched');
    });
    return [$tries, $found];
});

/** Subscribe, call each of the functions in turn, and return the messages, one after each. */
function messages(string $channel, callable ...$calls): array
{
    $found = [];
    $loop = connected()->pubSubLoop();
    $loop->subscribe($channel);
    foreach ($loop as $message) {
        if ($message->kind == 'message') {
            $found[] = $message->payload;
        }
        if (!$calls) {
            break;
        }
        array_shift($calls)();
    }
    unset($loop);
    return $found;
}

step('keyspace notifications', fn () => messages(
    '__keyspace@0__:job:text:live',
    fn () => ask('put', 'job:text:live', '1'),
    fn () => ask('delete', 'job:text:live')
));
if (PLACE != 'upstream') {
    refused_writes($client);
} else {
    step('SET, GET', fn () => [(string) $client->set('own:text', 'a'), $client->get('own:text')]);
    step('hashes, lists, sets', fn () => [
        $client->hset('own:map', 'f', 'v'), $client->hincrby('own:map', 'n', 5), $client->rpush('own:list', ['a', 'b']),
        $client->blpop(['own:list'], 1), $client->sadd('own:set', ['x', 'y']), $client->zadd('own:ranks', ['a' => 1.5]),
    ]);
    step('keys of both', fn () => $client->mget(['own:text', text(7), 'none']));
    step('MULTI of both', fn () => $client->transaction(function ($transaction) {
        $transaction->incr('own:counter');
        $transaction->get(text(7));
    }));
    step('a script', fn () => $client->eval(
        "redis.call('SET', KEYS[1], ARGV[1]) return redis.call('GET', KEYS[1])",
        1,
        'own:text',
        'd'
    ));
    step('messages', fn () => messages('own:channel', fn () => $client->publish('own:channel', 'hello')));
    step('DEL', fn () => $client->del(['own:text', 'own:map', 'own:set', 'own:ranks', 'own:counter', 'own:list']));
}
