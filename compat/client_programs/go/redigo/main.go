// redigo: a pool, pipelines by Send and Flush, transactions, scripts, messages.
package main

import (
	"fmt"
	"sort"
	"strings"
	"time"

	"github.com/gomodule/redigo/redis"

	. "sparkis/clientprograms/steps"
)

var pool = &redis.Pool{
	MaxIdle: 4,
	Dial: func() (redis.Conn, error) {
		return redis.Dial(
			"tcp", Address, redis.DialUsername(User), redis.DialPassword(Password),
			redis.DialUseTLS(TLS() != nil), redis.DialTLSConfig(TLS()), redis.DialClientName("program"),
		)
	},
	TestOnBorrow: func(own redis.Conn, since time.Time) error {
		_, err := own.Do("PING")
		return err
	},
}

func main() {
	texts()
	if Place == "tls" {
		return
	}
	reads()
	changes()
	Step("after its connection was killed", reconnects)
	if Place == "upstream" {
		writes()
	}
}

// do runs a command written as in redis-cli, over a connection of the pool.
func do(line string) (any, error) {
	own := pool.Get()
	defer own.Close()
	return doOver(own, line)
}

func doOver(own redis.Conn, line string) (any, error) {
	words := strings.Fields(line)
	return own.Do(words[0], redis.Args{}.AddFlat(words[1:])...)
}

// step runs a command as one step.
func step(line string) {
	Step(line, func() (any, error) {
		found, err := do(line)
		return readable(found), err
	})
}

// readable returns a reply with texts in place of bytes.
func readable(reply any) any {
	switch found := reply.(type) {
	case []byte:
		return string(found)
	case []any:
		items := make([]any, len(found))
		for i, each := range found {
			items[i] = readable(each)
		}
		return items
	}
	return reply
}

func texts() {
	for _, line := range []string{
		"GET job:text:007", "GET job:text:none", "MGET job:text:001 job:text:none job:text:299", "STRLEN job:text:long",
		"EXISTS job:text:007", "TYPE job:text:007", "PTTL job:text:007", "HGETALL job:text:007",
	} {
		step(line)
	}
	Step("a key of others", func() (any, error) { return redis.Int(do("HLEN job:map:flight")) })
	Step("a pipeline", func() (any, error) {
		own := pool.Get()
		defer own.Close()
		for _, key := range AllTexts() {
			own.Send("GET", key)
		}
		return redis.Strings(own.Do(""))
	})
	if Place != "upstream" {
		Step("a refused write", func() (any, error) { return do("SET job:text:007 x") })
		Step("a read after it", func() (any, error) { return redis.String(do("GET job:text:007")) })
	}
}

func reads() {
	Step("HGETALL", func() (any, error) { return redis.StringMap(do("HGETALL job:map:flight")) })
	for _, line := range []string{
		"HMGET job:map:flight to none", "LRANGE job:list:alerts 0 -1", "ZRANGE job:ranks:delays 0 -1 WITHSCORES",
		"ZSCORE job:ranks:delays PRG", "SISMEMBER job:set:airports PRG",
	} {
		step(line)
	}
	Step("SMEMBERS", func() (any, error) { return sorted(redis.Strings(do("SMEMBERS job:set:airports"))) })
	Step("SCAN", func() (any, error) {
		var keys []string
		for cursor := "0"; ; {
			found, err := redis.Values(do("SCAN " + cursor + " MATCH job:text:1* COUNT 1000"))
			if err != nil {
				return nil, err
			}
			some, _ := redis.Strings(found[1], nil)
			keys = append(keys, some...)
			if cursor, _ = redis.String(found[0], nil); cursor == "0" {
				return sorted(keys, nil)
			}
		}
	})
	Step("MULTI", func() (any, error) {
		return transaction("MULTI", "GET job:text:007", "HGET job:map:flight to", "LRANGE job:list:alerts 0 0", "EXEC")
	})
}

// transaction sends lines over one connection at once, and returns the last reply.
func transaction(lines ...string) (any, error) {
	own := pool.Get()
	defer own.Close()
	for _, line := range lines[:len(lines)-1] {
		words := strings.Fields(line)
		own.Send(words[0], redis.Args{}.AddFlat(words[1:])...)
	}
	found, err := own.Do(lines[len(lines)-1])
	return readable(found), err
}

// changes is what a client notices when a state changes: a watched key, a notification.
func changes() {
	Step("WATCH", func() (any, error) {
		Ask("put", "job:text:watched", "1")
		var found []any
		for _, isChanged := range []bool{true, false} {
			own := pool.Get()
			own.Do("WATCH", "job:text:watched")
			if isChanged {
				Ask("put", "job:text:watched", "2")
			}
			own.Send("MULTI")
			own.Send("GET", "job:text:watched")
			reply, err := own.Do("EXEC")
			found = append(found, readable(reply), err)
			own.Close()
		}
		return found, nil
	})
	Step("keyspace notifications", func() (any, error) {
		own := subscribed("__keyspace@0__:job:text:live")
		defer own.Close()
		Ask("put", "job:text:live", "1")
		set := own.ReceiveWithTimeout(time.Minute)
		Ask("delete", "job:text:live")
		return []string{message(set), message(own.ReceiveWithTimeout(time.Minute))}, nil
	})
}

// subscribed returns a connection after its subscription is confirmed.
func subscribed(channel string) redis.PubSubConn {
	own := redis.PubSubConn{Conn: pool.Get()}
	own.Subscribe(channel)
	own.ReceiveWithTimeout(time.Minute)
	return own
}

func message(received any) string {
	if found, isMessage := received.(redis.Message); isMessage {
		return string(found.Data)
	}
	return fmt.Sprint(received)
}

func reconnects() (any, error) {
	own := pool.Get()
	id, err := redis.Int(own.Do("CLIENT", "ID"))
	if err != nil {
		return nil, err
	}
	killed, err := redis.Int(do(fmt.Sprintf("CLIENT KILL ID %d", id)))
	if err != nil {
		return nil, err
	}
	_, failed := own.Do("GET", Text(7))
	own.Close()
	found, err := redis.String(do("GET " + Text(7)))
	return []any{killed, failed != nil, found}, err
}

func writes() {
	for _, line := range []string{
		"SET own:text a", "GET own:text", "SET own:lock me NX PX 60000", "SET own:lock you NX PX 60000", "DEL own:lock",
		"HSET own:map f v", "HINCRBY own:map n 5", "RPUSH own:list a b", "BLPOP own:list 1", "SADD own:set x y",
		"ZADD own:ranks 1.5 a", "ZRANGE own:ranks 0 -1 WITHSCORES", "MGET own:text job:text:007 none",
		"XGROUP CREATE own:stream group 0 MKSTREAM", "XADD own:stream 1-1 f v",
		"XREADGROUP GROUP group me COUNT 5 STREAMS own:stream >", "XACK own:stream group 1-1", "XLEN own:stream",
	} {
		step(line)
	}
	Step("MULTI of both", func() (any, error) {
		return transaction("MULTI", "INCR own:counter", "GET job:text:007", "SET own:text b", "EXEC")
	})
	Step("WATCH of one's own", func() (any, error) {
		own := pool.Get()
		defer own.Close()
		own.Do("WATCH", "own:text")
		do("SET own:text c")
		own.Send("MULTI")
		own.Send("SET", "own:text", "lost")
		reply, err := own.Do("EXEC")
		found, _ := redis.String(do("GET own:text"))
		return []any{reply, found}, err
	})
	Step("a script", func() (any, error) {
		own := pool.Get()
		defer own.Close()
		script := redis.NewScript(1, "redis.call('SET', KEYS[1], ARGV[1]) return redis.call('GET', KEYS[1])")
		return redis.String(script.Do(own, "own:text", "d"))
	})
	Step("messages", func() (any, error) {
		own := subscribed("own:channel")
		defer own.Close()
		receivers, err := redis.Int(do("PUBLISH own:channel hello"))
		return []any{receivers, message(own.ReceiveWithTimeout(time.Minute))}, err
	})
	Step("an expired key's notification", func() (any, error) {
		own := subscribed("__keyevent@0__:expired")
		defer own.Close()
		do("PSETEX own:brief 20 x")
		return message(own.ReceiveWithTimeout(time.Minute)), nil
	})
	step("DEL own:text own:map own:set own:ranks own:stream own:counter own:list")
}

func sorted(texts []string, err error) ([]string, error) {
	sort.Strings(texts)
	return texts, err
}
