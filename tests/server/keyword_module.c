/* A module for redis-server: KW.SET and KW.GET have their key at the end, which only COMMAND GETKEYS tells; KW.SUB has
 * the flag `pubsub`. The API is declared here, because Debian does not ship redismodule.h. */
#include <stddef.h>

typedef struct Context Context;
typedef struct String String;
typedef int Command(Context *, String **, int);

static int (*CreateCommand)(Context *, const char *, Command *, const char *, int, int, int);
static void (*SetModuleAttribs)(Context *, const char *, int, int);
static int (*IsKeysPositionRequest)(Context *);
static void (*KeyAtPos)(Context *, int);
static void *(*Call)(Context *, const char *, const char *, ...);
static int (*ReplyWithCallReply)(Context *, void *);
static int (*ReplyWithLongLong)(Context *, long long);
static unsigned long long (*GetClientId)(Context *);
static int (*WrongArity)(Context *);

static int set(Context *ctx, String **argv, int argc) {
  if (IsKeysPositionRequest(ctx)) return argc < 3 ? 0 : (KeyAtPos(ctx, argc - 1), 0);
  if (argc < 3) return WrongArity(ctx);
  return ReplyWithCallReply(ctx, Call(ctx, "SET", "ss!", argv[argc - 1], argv[1]));
}

static int get(Context *ctx, String **argv, int argc) {
  if (IsKeysPositionRequest(ctx)) return argc < 2 ? 0 : (KeyAtPos(ctx, argc - 1), 0);
  if (argc < 2) return WrongArity(ctx);
  return ReplyWithCallReply(ctx, Call(ctx, "GET", "s", argv[argc - 1]));
}

static int sub(Context *ctx, String **argv, int argc) { return ReplyWithLongLong(ctx, (long long)GetClientId(ctx)); }

int RedisModule_OnLoad(Context *ctx, String **argv, int argc) {
  int (*find)(const char *, void *) = ((void **)ctx)[0];
#define FIND(name) find("RedisModule_" #name, (void *)&name)
  FIND(CreateCommand), FIND(SetModuleAttribs), FIND(IsKeysPositionRequest), FIND(KeyAtPos), FIND(Call);
  FIND(ReplyWithCallReply), FIND(ReplyWithLongLong), FIND(GetClientId), FIND(WrongArity);
  SetModuleAttribs(ctx, "kw", 1, 1);
  CreateCommand(ctx, "kw.set", set, "write getkeys-api", 0, 0, 0);
  CreateCommand(ctx, "kw.get", get, "readonly getkeys-api", 1, 1, 1);
  return CreateCommand(ctx, "kw.sub", sub, "pubsub", 0, 0, 0);
}
