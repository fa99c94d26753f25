<?php
// phpredis: the extension's client: requests, pipelines, transactions, scripts, streams, messages; the cluster client.

require __DIR__ . '/steps.php';

function connected(): Redis
{
    $client = new Redis();
    $context = CA ? ['stream' => ['cafile' => CA, 'peer_name' => HOST]] : [];
    $client->connect((CA ? 'tls://' : '') . HOST, PORT, WAIT_S_MAX, null, 0, 0, $context);
    if (USER) {
        $client->auth([USER, PASSWORD]);
    }
    return $client;
}

/** Return a result with the error of a client that throws none. */
function with_error(Redis $client, callable $body): array
{
    $client->clearLastError();
    return [$body(), $client->getLastError()];
}

function texts(Redis $client): void
{
    step('GET', fn () => $client->get(text(7)));
    step('a missing key', fn () => $client->get('job:text:none'));
    step('MGET', fn () => $client->mGet([text(1), 'job:text:none', text(299)]));
    step('STRLEN', fn () => $client->strlen('job:text:long'));
    step('a pipeline', function () use ($client) {
        $pipeline = $client->pipeline();
        array_map([$pipeline, 'get'], all_texts());
        return $pipeline->exec();
    });
    step('EXISTS, TYPE, TTL', fn () => [$client->exists(text(7)), $client->type(text(7)), $client->ttl(text(7))]);
    step('WRONGTYPE', fn () => with_error($client, fn () => $client->hGetAll(text(7))));
    step('a key of others', fn () => with_error($client, fn () => $client->hLen('job:map:flight')));
    if (PLACE != 'upstream') {
        step('a refused write', fn () => with_error($client, fn () => $client->set(text(7), 'x')));
        step('a read after it', fn () => $client->get(text(7)));
    }
}

function reads(Redis $client): void
{
    step('HGETALL', fn () => sorted($client->hGetAll('job:map:flight')));
    step('HMGET', fn () => $client->hMGet('job:map:flight', ['to', 'none']));
    $client->setOption(Redis::OPT_SCAN, Redis::SCAN_RETRY);
    step('HSCAN', function () use ($client) {
        for ($fields = [], $cursor = null; $found = $client->hScan('job:map:large', $cursor);) {
            $fields += $found;
        }
        return count($fields);
    });
    step('LRANGE', fn () => $client->lRange('job:list:alerts', 0, -1));
    step('SMEMBERS', fn () => sorted($client->sMembers('job:set:airports')));
    step('ZRANGE', fn () => $client->zRange('job:ranks:delays', 0, -1, true));
    step('SCAN', function () use ($client) {
        for ($keys = [], $cursor = null; $found = $client->scan($cursor, 'job:text:1*', 1000);) {
            $keys = array_merge($keys, $found);
        }
        return sorted(array_values(array_unique($keys)));
    });
    step('MULTI', fn () => $client->multi()->get(text(7))->hGet('job:map:flight', 'to')->lRange('job:list:alerts', 0, 0)->exec());
    step('WATCH', function () use ($client) {
        ask('put', 'job:text:watched', '1');
        $found = [];
        foreach ([true, false] as $is_changed) {
            $client->watch('job:text:watched');
            if ($is_changed) {
                ask('put', 'job:text:watched', '2');
            }
            $found[] = $client->multi()->get('job:text:watched')->exec();
        }
        return $found;
    });
    step('after its connection was killed', function () use ($client) {
        $killed = connected()->rawCommand('CLIENT', 'KILL', 'ID', $client->rawCommand('CLIENT', 'ID'));
        return [$killed, until_equal(fn () => $client->get(text(7)), '7')];
    });
}

function writes(Redis $client): void
{
    step('SET, GET', fn () => [$client->set('own:text', 'a'), $client->get('own:text')]);
    step('SET NX PX', fn () => [
        $client->set('own:lock', 'me', ['nx', 'px' => 60000]),
        $client->set('own:lock', 'you', ['nx', 'px' => 60000]),
        $client->del('own:lock'),
    ]);
    step('hashes, lists, sets', fn () => [
        $client->hSet('own:map', 'f', 'v'), $client->hIncrBy('own:map', 'n', 5), sorted($client->hGetAll('own:map')),
        $client->rPush('own:list', 'a', 'b'), $client->blPop(['own:list'], 1), $client->sAdd('own:set', 'x', 'y'),
        $client->zAdd('own:ranks', 1.5, 'a'), $client->zRange('own:ranks', 0, -1, true),
    ]);
    step('keys of both', fn () => $client->mGet(['own:text', text(7), 'none']));
    step('MULTI of both', fn () => $client->multi()->incr('own:counter')->get(text(7))->set('own:text', 'b')->exec());
    step('WATCH of one\'s own', function () use ($client) {
        $client->watch('own:text');
        connected()->set('own:text', 'c');
        return [$client->multi()->set('own:text', 'lost')->exec(), $client->get('own:text')];
    });
    step('a script', fn () => $client->eval(
        "redis.call('SET', KEYS[1], ARGV[1]) return redis.call('GET', KEYS[1])",
        ['own:text', 'd'],
        1
    ));
    step('a stream', fn () => [
        $client->xGroup('CREATE', 'own:stream', 'group', '0', true), $client->xAdd('own:stream', '1-1', ['f' => 'v']),
        $client->xReadGroup('group', 'me', ['own:stream' => '>'], 5), $client->xAck('own:stream', 'group', ['1-1']),
    ]);
    publish($client);
    step('DEL', fn () => $client->del('own:text', 'own:map', 'own:set', 'own:ranks', 'own:stream', 'own:counter', 'own:list'));
}

/** Publish until another process has subscribed, and has printed the message as a step. */
function publish(Redis $client): void
{
    $child = pcntl_fork();
    if ($child == 0) {
        connected()->subscribe(['own:channel'], function ($client, $channel, $message) {
            step('a message', fn () => [$channel, $message]);
            posix_kill(posix_getpid(), SIGKILL);
        });
    }
    until_equal(fn () => $client->publish('own:channel', 'hello'), 1);
    pcntl_waitpid($child, $status);
}

function cluster(): void
{
    $client = new RedisCluster(null, [HOST . ':' . PORT], WAIT_S_MAX, WAIT_S_MAX);
    $all = fn () => $client->mGet(all_texts());
    $expected = $all();
    step('MGET of all slots', $all);
    step('a map', fn () => sorted($client->hGetAll('job:map:flight')));
    step('MULTI', fn () => $client->multi()->get(text(7))->strlen(text(7))->exec());
    ask('kill', text(7));
    // Not mGet: at a Redis Cluster, too, it ends PHP with a signal once a node has ended (phpredis 5.3).
    step("after a server's end", fn () => until_equal(fn () => array_map([$client, 'get'], all_texts()), array_values($expected)));
    step('MGET after it', $all);
    ask('put', 'job:text:live', '2');
    step('a new value after it', fn () => until_equal(fn () => $client->get('job:text:live'), '2'));
}

if (PLACE == 'cluster') {
    cluster();
    exit;
}
$client = connected();
texts($client);
if (PLACE != 'tls') {
    reads($client);
}
if (PLACE == 'upstream') {
    writes($client);
}
