package main

import (
	"context"
	"strconv"
	"time"

	"github.com/redis/rueidis"
)

// A reply is cached for less time than it takes to walk through all keys: nearly every read asks the server.
const cached = 100 * time.Millisecond

// rueidis with its default options, but for `rueidis`: that client does not track. isCached: reads ask its cache first.
type rueidisClient struct {
	rueidis.Client
	isCached bool
}

func newRueidis(address, name string) (client, error) {
	options := rueidis.ClientOption{InitAddress: []string{address}, DisableCache: name == "rueidis"}
	made, err := rueidis.NewClient(options)
	return rueidisClient{made, name == "rueidis-cache"}, err
}

func (c rueidisClient) get(ctx context.Context, key string) (string, error) {
	if c.isCached {
		return c.DoCache(ctx, c.B().Get().Key(key).Cache(), cached).ToString()
	}
	return c.Do(ctx, c.B().Get().Key(key).Build()).ToString()
}

func (c rueidisClient) mget(ctx context.Context, keys []string) ([]string, error) {
	if c.isCached {
		replies, err := rueidis.MGetCache(c.Client, ctx, cached, keys)
		found := make([]string, len(keys))
		for i, key := range keys {
			message := replies[key]
			if value, err := message.ToString(); err == nil {
				found[i] = value
			}
		}
		return found, err
	}
	return c.Do(ctx, c.B().Mget().Key(keys...).Build()).AsStrSlice()
}

func (c rueidisClient) hgetall(ctx context.Context, key string) (map[string]string, error) {
	if c.isCached {
		return c.DoCache(ctx, c.B().Hgetall().Key(key).Cache(), cached).AsStrMap()
	}
	return c.Do(ctx, c.B().Hgetall().Key(key).Build()).AsStrMap()
}

func (c rueidisClient) pipeline(ctx context.Context, keys []string) ([]string, error) {
	if c.isCached {
		commands := make([]rueidis.CacheableTTL, len(keys))
		for i, key := range keys {
			commands[i] = rueidis.CT(c.B().Get().Key(key).Cache(), cached)
		}
		return texts(c.DoMultiCache(ctx, commands...))
	}
	commands := make(rueidis.Commands, len(keys))
	for i, key := range keys {
		commands[i] = c.B().Get().Key(key).Build()
	}
	return texts(c.DoMulti(ctx, commands...))
}

func (c rueidisClient) transaction(ctx context.Context, first, second string) (found []string, err error) {
	err = c.Dedicated(func(own rueidis.DedicatedClient) error {
		replies := own.DoMulti(
			ctx,
			own.B().Multi().Build(),
			own.B().Get().Key(first).Build(),
			own.B().Get().Key(second).Build(),
			own.B().Exec().Build(),
		)
		found, err = replies[len(replies)-1].AsStrSlice()
		return err
	})
	return found, err
}

func (c rueidisClient) set(ctx context.Context, key, value string) error {
	return c.Do(ctx, c.B().Set().Key(key).Value(value).Build()).Error()
}

func (c rueidisClient) increment(ctx context.Context, key string) (isDone bool, err error) {
	err = c.Dedicated(func(own rueidis.DedicatedClient) error {
		if err := own.Do(ctx, own.B().Watch().Key(key).Build()).Error(); err != nil {
			return err
		}
		number, err := own.Do(ctx, own.B().Get().Key(key).Build()).AsInt64()
		if err != nil && !rueidis.IsRedisNil(err) {
			return err
		}
		replies := own.DoMulti(
			ctx,
			own.B().Multi().Build(),
			own.B().Set().Key(key).Value(strconv.FormatInt(number+1, 10)).Build(),
			own.B().Exec().Build(),
		)
		err = replies[len(replies)-1].Error()
		if rueidis.IsRedisNil(err) {
			return nil
		}
		isDone = err == nil
		return err
	})
	return isDone, err
}

func (c rueidisClient) number(ctx context.Context, key string) (int, error) {
	number, err := c.Do(ctx, c.B().Get().Key(key).Build()).AsInt64()
	if rueidis.IsRedisNil(err) {
		return 0, nil
	}
	return int(number), err
}

func texts(replies []rueidis.RedisResult) ([]string, error) {
	found := make([]string, len(replies))
	for i, reply := range replies {
		var err error
		if found[i], err = reply.ToString(); err != nil {
			return nil, err
		}
	}
	return found, nil
}
