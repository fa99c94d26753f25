package main

import (
	"context"
	"errors"

	"github.com/redis/go-redis/v9"
)

type goRedis struct{ *redis.Client }

func newGoRedis(address string) client {
	return goRedis{redis.NewClient(&redis.Options{Addr: address})}
}

func (c goRedis) get(ctx context.Context, key string) (string, error) {
	return c.Get(ctx, key).Result()
}

func (c goRedis) mget(ctx context.Context, keys []string) ([]string, error) {
	values, err := c.MGet(ctx, keys...).Result()
	found := make([]string, len(values))
	for i, value := range values {
		found[i], _ = value.(string)
	}
	return found, err
}

func (c goRedis) hgetall(ctx context.Context, key string) (map[string]string, error) {
	return c.HGetAll(ctx, key).Result()
}

func (c goRedis) pipeline(ctx context.Context, keys []string) ([]string, error) {
	return values(c.Pipelined(ctx, gets(ctx, keys)))
}

func (c goRedis) transaction(ctx context.Context, first, second string) ([]string, error) {
	return values(c.TxPipelined(ctx, gets(ctx, []string{first, second})))
}

func (c goRedis) set(ctx context.Context, key, value string) error {
	return c.Set(ctx, key, value, 0).Err()
}

func (c goRedis) increment(ctx context.Context, key string) (bool, error) {
	err := c.Watch(ctx, func(tx *redis.Tx) error {
		number, err := tx.Get(ctx, key).Int()
		if err != nil && !errors.Is(err, redis.Nil) {
			return err
		}
		_, err = tx.TxPipelined(ctx, func(pipe redis.Pipeliner) error {
			pipe.Set(ctx, key, number+1, 0)
			return nil
		})
		return err
	}, key)
	if errors.Is(err, redis.TxFailedErr) {
		return false, nil
	}
	return err == nil, err
}

func (c goRedis) number(ctx context.Context, key string) (int, error) {
	number, err := c.Get(ctx, key).Int()
	if errors.Is(err, redis.Nil) {
		return 0, nil
	}
	return number, err
}

func gets(ctx context.Context, keys []string) func(redis.Pipeliner) error {
	return func(pipe redis.Pipeliner) error {
		for _, key := range keys {
			pipe.Get(ctx, key)
		}
		return nil
	}
}

func values(commands []redis.Cmder, err error) ([]string, error) {
	found := make([]string, len(commands))
	for i, command := range commands {
		if get, isGet := command.(*redis.StringCmd); isGet {
			found[i] = get.Val()
		}
	}
	return found, err
}
