// rueidis: one connection for all requests, pipelines, transactions, messages, the client-side cache; the cluster client.
package main

import (
	"context"
	"fmt"
	"sort"
	"strings"
	"time"

	"github.com/redis/rueidis"

	. "sparkis/clientprograms/steps"
)

var ctx = context.Background()

// Longer than a program runs: a cached reply ends by an invalidation only.
const cached = time.Hour

func main() {
	client, err := rueidis.NewClient(rueidis.ClientOption{
		InitAddress: []string{Address}, Username: User, Password: Password, TLSConfig: TLS(), ClientName: "program",
	})
	if err != nil {
		panic(err)
	}
	defer client.Close()
	p := program{client}
	if Place == "cluster" {
		p.cluster()
		return
	}
	p.texts()
	p.cache("job:text:007", "")
	if Place == "tls" {
		return
	}
	p.reads()
	p.changes()
	p.cache("job:text:live", "4")
	p.caches()
	Step("after its connection was killed", p.reconnects)
	if Place == "upstream" {
		p.writes()
	}
}

type program struct{ rueidis.Client }

// do runs a command written as in redis-cli.
func (p program) do(line string) rueidis.RedisResult {
	words := strings.Fields(line)
	return p.Do(ctx, p.B().Arbitrary(words...).Build())
}

// step runs a command as one step.
func (p program) step(line string) {
	Step(line, func() (any, error) { return p.do(line).ToAny() })
}

func (p program) texts() {
	for _, line := range []string{
		"GET job:text:007", "GET job:text:none", "MGET job:text:001 job:text:none job:text:299", "STRLEN job:text:long",
		"EXISTS job:text:007", "TYPE job:text:007", "PTTL job:text:007", "HGETALL job:text:007",
	} {
		p.step(line)
	}
	Step("a key of others", func() (any, error) { return p.do("HLEN job:map:flight").AsInt64() })
	Step("a pipeline", func() (any, error) {
		commands := make(rueidis.Commands, Texts)
		for i, key := range AllTexts() {
			commands[i] = p.B().Get().Key(key).Build()
		}
		return texts(p.DoMulti(ctx, commands...))
	})
	if Place != "upstream" {
		Step("a refused write", func() (any, error) { return p.do("SET job:text:007 x").ToAny() })
		Step("a read after it", func() (any, error) { return p.do("GET job:text:007").ToAny() })
	}
}

func (p program) reads() {
	Step("HGETALL", func() (any, error) { return p.Do(ctx, p.B().Hgetall().Key("job:map:flight").Build()).AsStrMap() })
	for _, line := range []string{
		"HMGET job:map:flight to none", "LRANGE job:list:alerts 0 -1", "ZRANGE job:ranks:delays 0 -1 WITHSCORES",
		"ZSCORE job:ranks:delays PRG", "SISMEMBER job:set:airports PRG",
	} {
		p.step(line)
	}
	Step("SMEMBERS", func() (any, error) { return sorted(p.do("SMEMBERS job:set:airports").AsStrSlice()) })
	Step("HSCAN", func() (any, error) {
		fields := map[string]bool{}
		err := p.scan("HSCAN job:map:large %d", func(found []string) {
			for i := 0; i < len(found); i += 2 {
				fields[found[i]] = true
			}
		})
		return len(fields), err
	})
	Step("SCAN", func() (any, error) {
		var keys []string
		err := p.scan("SCAN %d MATCH job:text:1* COUNT 1000", func(found []string) { keys = append(keys, found...) })
		return sorted(keys, err)
	})
	Step("MULTI", func() (any, error) {
		return p.transaction("MULTI", "GET job:text:007", "HGET job:map:flight to", "LRANGE job:list:alerts 0 0", "EXEC")
	})
}

func (p program) scan(line string, add func([]string)) error {
	for cursor := uint64(0); ; {
		entry, err := p.do(fmt.Sprintf(line, cursor)).AsScanEntry()
		if err != nil {
			return err
		}
		add(entry.Elements)
		if cursor = entry.Cursor; cursor == 0 {
			return nil
		}
	}
}

// transaction runs lines on one connection, and returns the last reply.
func (p program) transaction(lines ...string) (found any, err error) {
	err = p.Dedicated(func(own rueidis.DedicatedClient) error {
		commands := make(rueidis.Commands, len(lines))
		for i, line := range lines {
			commands[i] = own.B().Arbitrary(strings.Fields(line)...).Build()
		}
		replies := own.DoMulti(ctx, commands...)
		found, err = replies[len(replies)-1].ToAny()
		return err
	})
	return found, err
}

// changes is what a client notices when a state changes: a watched key, a notification.
func (p program) changes() {
	Step("WATCH", func() (any, error) {
		Ask("put", "job:text:watched", "1")
		var found []any
		for _, isChanged := range []bool{true, false} {
			err := p.Dedicated(func(own rueidis.DedicatedClient) error {
				own.Do(ctx, own.B().Watch().Key("job:text:watched").Build())
				if isChanged {
					Ask("put", "job:text:watched", "2")
				}
				replies := own.DoMulti(
					ctx, own.B().Multi().Build(), own.B().Get().Key("job:text:watched").Build(), own.B().Exec().Build(),
				)
				reply, err := replies[2].ToAny()
				found = append(found, reply)
				return err
			})
			found = append(found, err)
		}
		return found, nil
	})
	Step("keyspace notifications", func() (any, error) {
		messages, end := p.subscribed("__keyspace@0__:job:text:live")
		defer end()
		Ask("put", "job:text:live", "1")
		set, err := Next(messages)
		if err != nil {
			return nil, err
		}
		Ask("delete", "job:text:live")
		del, err := Next(messages)
		return []string{set, del}, err
	})
}

// subscribed returns the messages of a channel after the subscription is confirmed.
func (p program) subscribed(channel string) (<-chan string, func()) {
	messages, confirmed := make(chan string, 100), make(chan string, 1)
	own, release := p.Dedicate()
	own.SetPubSubHooks(rueidis.PubSubHooks{
		OnSubscription: func(each rueidis.PubSubSubscription) {
			if each.Kind == "subscribe" {
				confirmed <- each.Channel
			}
		},
		OnMessage: func(each rueidis.PubSubMessage) { messages <- each.Message },
	})
	if err := own.Do(ctx, own.B().Subscribe().Channel(channel).Build()).Error(); err != nil {
		panic(err)
	}
	<-confirmed
	return messages, release
}

// cache reads a key until the cache has it, and, if there is a next value, until the cache has that.
func (p program) cache(key, next string) {
	Step("the cache has "+key, func() (any, error) {
		get := func() (string, error) { return p.DoCache(ctx, p.B().Get().Key(key).Cache(), cached).ToString() }
		isHit := func() (bool, error) { return p.DoCache(ctx, p.B().Get().Key(key).Cache(), cached).IsCacheHit(), nil }
		if next != "" {
			Ask("put", key, "3")
		}
		before, err := get()
		if err != nil {
			return nil, err
		}
		if _, err = UntilEqual(isHit, true); err != nil || next == "" {
			return before, err
		}
		Ask("put", key, next)
		after, err := UntilEqual(get, next)
		if err != nil {
			return nil, err
		}
		_, err = UntilEqual(isHit, true)
		return []string{before, after}, err
	})
}

// caches reads keys of all kinds until the cache has all of them.
func (p program) caches() {
	Step("the cache has keys of all kinds", func() (any, error) {
		var values []any
		_, err := UntilEqual(func() (int, error) {
			hits := 0
			values = nil
			for _, each := range p.DoMultiCache(
				ctx,
				rueidis.CT(p.B().Hget().Key("job:map:flight").Field("to").Cache(), cached),
				rueidis.CT(p.B().Hmget().Key("job:map:flight").Field("from", "none").Cache(), cached),
				rueidis.CT(p.B().Lrange().Key("job:list:alerts").Start(0).Stop(1).Cache(), cached),
				rueidis.CT(p.B().Sismember().Key("job:set:airports").Member("PRG").Cache(), cached),
				rueidis.CT(p.B().Zscore().Key("job:ranks:delays").Member("PRG").Cache(), cached),
				rueidis.CT(p.B().Strlen().Key("job:text:long").Cache(), cached),
			) {
				value, err := each.ToAny()
				values = append(values, value, err)
				if each.IsCacheHit() {
					hits++
				}
			}
			return hits, nil
		}, 6)
		return values, err
	})
	Step("the cache has several keys", func() (any, error) {
		keys, values := []string{Text(1), Text(2), Text(3)}, make([]string, 3)
		_, err := UntilEqual(func() (int, error) {
			hits := 0
			replies, err := rueidis.MGetCache(p.Client, ctx, cached, keys)
			for i, key := range keys {
				reply := replies[key]
				values[i], _ = reply.ToString()
				if reply.IsCacheHit() {
					hits++
				}
			}
			return hits, err
		}, len(keys))
		return values, err
	})
}

func (p program) reconnects() (any, error) {
	id := p.do("CLIENT ID")
	number, err := id.AsInt64()
	if err != nil {
		return nil, err
	}
	p.do(fmt.Sprintf("CLIENT KILL ID %d SKIPME no", number))
	value, err := UntilEqual(func() (string, error) { return p.do("GET job:text:007").ToString() }, "7")
	if err != nil {
		return nil, err
	}
	again, err := p.do("CLIENT ID").AsInt64()
	return []any{value, again != number}, err
}

func (p program) writes() {
	for _, line := range []string{
		"SET own:text a", "GET own:text", "SET own:lock me NX PX 60000", "SET own:lock you NX PX 60000", "DEL own:lock",
		"HSET own:map f v", "HINCRBY own:map n 5", "RPUSH own:list a b", "BLPOP own:list 1", "SADD own:set x y",
		"ZADD own:ranks 1.5 a", "ZRANGE own:ranks 0 -1 WITHSCORES", "MGET own:text job:text:007 none",
		"XGROUP CREATE own:stream group 0 MKSTREAM", "XADD own:stream 1-1 f v",
		"XREADGROUP GROUP group me COUNT 5 STREAMS own:stream >", "XACK own:stream group 1-1", "XLEN own:stream",
	} {
		p.step(line)
	}
	Step("MULTI of both", func() (any, error) {
		return p.transaction("MULTI", "INCR own:counter", "GET job:text:007", "SET own:text b", "EXEC")
	})
	Step("WATCH of one's own", func() (any, error) {
		found, err := any(nil), p.Dedicated(func(own rueidis.DedicatedClient) error {
			own.Do(ctx, own.B().Watch().Key("own:text").Build())
			p.do("SET own:text c")
			replies := own.DoMulti(
				ctx, own.B().Multi().Build(), own.B().Set().Key("own:text").Value("lost").Build(), own.B().Exec().Build(),
			)
			return replies[2].Error()
		})
		found, _ = p.do("GET own:text").ToAny()
		return []any{err, found}, nil
	})
	Step("a script", func() (any, error) {
		script := rueidis.NewLuaScript("redis.call('SET', KEYS[1], ARGV[1]) return redis.call('GET', KEYS[1])")
		return script.Exec(ctx, p.Client, []string{"own:text"}, []string{"d"}).ToString()
	})
	Step("the cache has a key of one's own", func() (any, error) {
		get := func() rueidis.RedisResult { return p.DoCache(ctx, p.B().Get().Key("own:text").Cache(), cached) }
		if _, err := UntilEqual(func() (bool, error) { return get().IsCacheHit(), nil }, true); err != nil {
			return nil, err
		}
		p.do("SET own:text e")
		return UntilEqual(func() (string, error) { return get().ToString() }, "e")
	})
	Step("messages", func() (any, error) {
		messages, end := p.subscribed("own:channel")
		defer end()
		receivers, _ := p.do("PUBLISH own:channel hello").AsInt64()
		message, err := Next(messages)
		return []any{receivers, message}, err
	})
	Step("an expired key's notification", func() (any, error) {
		messages, end := p.subscribed("__keyevent@0__:expired")
		defer end()
		p.do("PSETEX own:brief 20 x")
		return Next(messages)
	})
	p.step("DEL own:text own:map own:set own:ranks own:stream own:counter own:list")
}

func (p program) cluster() {
	read := func() ([]string, error) {
		commands := make(rueidis.Commands, Texts)
		for i, key := range AllTexts() {
			commands[i] = p.B().Get().Key(key).Build()
		}
		return texts(p.DoMulti(ctx, commands...))
	}
	expected, err := read()
	Step("a pipeline", func() (any, error) { return expected, err })
	Step("MGET of several slots", func() (any, error) {
		found, err := rueidis.MGet(p.Client, ctx, AllTexts())
		values := make([]string, Texts)
		for i, key := range AllTexts() {
			message := found[key]
			values[i], _ = message.ToString()
		}
		return values, err
	})
	p.step("HGET job:map:flight to")
	p.cache("job:text:live", "4")
	p.caches()
	Step("after a server's end", func() (any, error) {
		Ask("kill", Text(7))
		return UntilEqual(read, expected)
	})
	Step("a new value after it", func() (any, error) {
		Ask("put", "job:text:live", "5")
		return UntilEqual(func() (string, error) { return p.do("GET job:text:live").ToString() }, "5")
	})
}

// texts returns the texts of replies, or the first error.
func texts(replies []rueidis.RedisResult) ([]string, error) {
	found := make([]string, len(replies))
	for i, each := range replies {
		value, err := each.ToString()
		if err != nil {
			return nil, err
		}
		found[i] = value
	}
	return found, nil
}

func sorted(texts []string, err error) ([]string, error) {
	sort.Strings(texts)
	return texts, err
}
