/* hiredis: requests, pipelines, transactions, scripts, streams, messages, as a program in C sends them. */
#include <hiredis/hiredis.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>

#define TEXTS 300 /* job:text:000 to job:text:299, each with its number */

static redisContext *connected(void)
{
    struct timeval limit = {120, 0}; /* longer than any wait on a busy machine; it ends a hang */
    redisContext *client = redisConnectWithTimeout(getenv("REDIS_HOST"), atoi(getenv("REDIS_PORT")), limit);
    if (client == NULL || client->err) {
        fprintf(stderr, "%s\n", client == NULL ? "no memory" : client->errstr);
        exit(1);
    }
    redisSetTimeout(client, limit);
    return client;
}

/* Print a reply in one line. */
static void print(redisReply *reply)
{
    size_t i;
    switch (reply == NULL ? 0 : reply->type) {
    case REDIS_REPLY_INTEGER:
        printf("%lld", reply->integer);
        break;
    case REDIS_REPLY_NIL:
        printf("nil");
        break;
    case REDIS_REPLY_ARRAY:
        printf("[");
        for (i = 0; i < reply->elements; i++) {
            printf(i ? ", " : "");
            print(reply->element[i]);
        }
        printf("]");
        break;
    case 0:
        printf("no reply");
        break;
    default:
        printf("%s%.*s", reply->type == REDIS_REPLY_ERROR ? "error " : "", (int)reply->len, reply->str);
    }
}

static void end(redisReply *reply)
{
    print(reply);
    printf("\n");
    if (reply != NULL)
        freeReplyObject(reply);
}

/* Run a line as one step. */
static void step(redisContext *client, const char *line)
{
    printf("%s: ", line);
    end(redisCommand(client, line));
}

/* Send lines in one write, and print the replies. */
static void pipeline(redisContext *client, const char *name, const char **lines)
{
    redisReply *reply;
    int i, count = 0;
    for (; lines[count] != NULL; count++)
        redisAppendCommand(client, lines[count]);
    printf("%s: ", name);
    for (i = 0; i < count; i++) {
        if (redisGetReply(client, (void **)&reply) != REDIS_OK)
            reply = NULL;
        printf(i ? ", " : "");
        print(reply);
        if (reply != NULL)
            freeReplyObject(reply);
    }
    printf("\n");
}

/* Ask the runner to put or delete a state's key; wait until it is done. */
static void ask(const char *words)
{
    char answer[16];
    printf("! %s\n", words);
    fflush(stdout);
    if (fgets(answer, sizeof answer, stdin) == NULL)
        exit(1);
}

static void read_states(redisContext *client)
{
    static const char *lines[] = {
        "GET job:text:007", "GET job:text:none", "MGET job:text:001 job:text:none job:text:299", "STRLEN job:text:long",
        "TYPE job:text:007", "PTTL job:text:007", "HGETALL job:text:007", "HLEN job:map:flight", "HMGET job:map:flight to none",
        "LRANGE job:list:alerts 0 -1", "SCARD job:set:airports", "ZRANGE job:ranks:delays 0 -1 WITHSCORES",
        "ZSCORE job:ranks:delays PRG", NULL};
    static const char *transaction[] = {
        "MULTI", "GET job:text:007", "HGET job:map:flight to", "LRANGE job:list:alerts 0 0", "EXEC", NULL};
    redisReply *reply;
    int i, right = 0;
    for (i = 0; lines[i] != NULL; i++)
        step(client, lines[i]);
    for (i = 0; i < TEXTS; i++)
        redisAppendCommand(client, "GET job:text:%s%d", i < 10 ? "00" : i < 100 ? "0" : "", i);
    for (i = 0; i < TEXTS && redisGetReply(client, (void **)&reply) == REDIS_OK; i++) {
        right += reply->type == REDIS_REPLY_STRING && atoi(reply->str) == i;
        freeReplyObject(reply);
    }
    printf("right values of a pipeline: %d\n", right);
    pipeline(client, "MULTI", transaction);
}

/* What a client notices when a state changes: a watched key, a notification. */
static void changes(redisContext *client)
{
    static const char *transaction[] = {"MULTI", "GET job:text:watched", "EXEC", NULL};
    redisContext *listening = connected();
    redisReply *reply;
    int i;
    ask("put job:text:watched 1");
    freeReplyObject(redisCommand(client, "WATCH job:text:watched"));
    ask("put job:text:watched 2");
    pipeline(client, "WATCH of a key that changes", transaction);
    pipeline(client, "a transaction after it", transaction);
    freeReplyObject(redisCommand(listening, "SUBSCRIBE __keyspace@0__:job:text:live"));
    for (i = 0; i < 2; i++) {
        ask(i ? "delete job:text:live" : "put job:text:live 1");
        printf("keyspace notification %d: ", i);
        end(redisGetReply(listening, (void **)&reply) == REDIS_OK ? reply : NULL);
    }
    redisFree(listening);
}

static void reconnect(redisContext *client)
{
    redisContext *other = connected();
    redisReply *id = redisCommand(other, "CLIENT ID"), *reply;
    freeReplyObject(redisCommand(client, "CLIENT KILL ID %lld", id->integer));
    freeReplyObject(id);
    reply = redisCommand(other, "GET job:text:007");
    printf("after its connection was killed: %s, ", reply == NULL ? "no reply" : "a reply");
    redisReconnect(other);
    end(redisCommand(other, "GET job:text:007"));
    redisFree(other);
}

static void write_own(redisContext *client)
{
    static const char *lines[] = {
        "SET own:text a", "GET own:text", "SET own:lock me NX PX 60000", "SET own:lock you NX PX 60000", "DEL own:lock",
        "HSET own:map f v", "HINCRBY own:map n 5", "RPUSH own:list a b", "BLPOP own:list 1", "SADD own:set x y",
        "ZADD own:ranks 1.5 a", "MGET own:text job:text:007 none", "XGROUP CREATE own:stream group 0 MKSTREAM",
        "XADD own:stream 1-1 f v", "XREADGROUP GROUP group me COUNT 5 STREAMS own:stream >", "XACK own:stream group 1-1", NULL};
    static const char *transaction[] = {"MULTI", "INCR own:counter", "GET job:text:007", "SET own:text b", "EXEC", NULL};
    static const char *lost[] = {"MULTI", "SET own:text lost", "EXEC", "GET own:text", NULL};
    redisContext *listening = connected();
    redisReply *reply;
    int i;
    for (i = 0; lines[i] != NULL; i++)
        step(client, lines[i]);
    pipeline(client, "MULTI of both", transaction);
    freeReplyObject(redisCommand(client, "WATCH own:text"));
    freeReplyObject(redisCommand(listening, "SET own:text c"));
    pipeline(client, "WATCH of one's own", lost);
    printf("a script: ");
    end(redisCommand(client, "EVAL %s 1 own:text d",
                     "redis.call('SET', KEYS[1], ARGV[1]) return redis.call('GET', KEYS[1])"));
    freeReplyObject(redisCommand(listening, "SUBSCRIBE own:channel"));
    step(client, "PUBLISH own:channel hello");
    printf("a message: ");
    end(redisGetReply(listening, (void **)&reply) == REDIS_OK ? reply : NULL);
    step(client, "DEL own:text own:map own:set own:ranks own:stream own:counter own:list");
    redisFree(listening);
}

int main(void)
{
    redisContext *client = connected();
    read_states(client);
    changes(client);
    reconnect(client);
    if (strcmp(getenv("PLACE"), "upstream") == 0) {
        write_own(client);
    } else {
        printf("a refused write: ");
        end(redisCommand(client, "SET job:text:007 x"));
        printf("a read after it: ");
        end(redisCommand(client, "GET job:text:007"));
    }
    redisFree(client);
    return 0;
}
