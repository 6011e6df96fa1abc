select count(*) from rows
select * from jobs
select * from samples
select * from items
select 1
describe measurements
select * exclude (versions) from rows
;
;;
--
select
drop table measurements
select 1; select 2
copy rows to 'x'
attach 'x.db'
install httpfs
pragma database_list
checkpoint
select * from read_csv('/etc/passwd')
select chr(0)
explain select 1
select interval 1 year
select timestamp 'infinity'
select date '-infinity'
select 1::hugeint << 100
select 'nan'::double
select [1,2]
select {'a': {'b': 1}}
select map {1: 2}
select '\xff'::blob
select uuid()
select time '00:00'
set x = 1
create table t as select 1
with x as (select 1)
select sum(cards) from jobs
select * from jobs order by all
begin
commit
select *
select $1
select ?
prepare p as select 1
call pragma_version()
values (1), (2)
select 'a' as ""
select 1 as a, 2 as a
insert into rows values (1)
